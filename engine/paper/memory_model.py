"""Where a card's memory goes, computed from a model's shape alone: parameters, KV cache, and what is left (Figure 1, Table 1, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import InvalidInput

GB = 10**9
GIB = 2**30
Family = Literal["opt", "llama"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. `num_kv_heads`: heads whose keys and values are kept (fewer than `num_heads` with grouped queries). `dtype_bytes`: of parameters
    and cache.

    `family` says which layers there are. ``opt``: learned positions, biases, LayerNorm, two matrices in the feed-forward part, output layer tied to the
    embedding. ``llama``: rotary positions, no biases, RMSNorm, three matrices; `tied_embeddings` tells whether the output layer is the embedding.
    `source`: where the shape is from. Raises InvalidInput for a size below 1.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    dtype_bytes: int = 2
    family: Family = "llama"
    tied_embeddings: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "positions", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{self.name}: {name} is {getattr(self, name)}, but it must be at least 1")

    @property
    def num_parameters(self) -> int:
        """Numbers that the model has learned, counted layer by layer."""
        hidden, attention, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = hidden * attention + 2 * hidden * kv + attention * hidden
        if self.family == "opt":
            layer = projections + attention + 2 * kv + hidden + 2 * hidden * self.ffn + self.ffn + hidden + 4 * hidden
            outside = self.vocab * hidden + (self.positions + 2) * hidden + 2 * hidden  # OPT's position table has two rows that no position uses
        else:
            layer = projections + 3 * hidden * self.ffn + 2 * hidden
            outside = self.vocab * hidden * (1 if self.tied_embeddings else 2) + hidden
        return self.num_layers * layer + outside

    @property
    def parameters_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """A key and a value per layer and KV head: 2 * layers * KV heads * head_dim * bytes (section 3: 2 * 5120 * 40 * 2 for OPT-13B)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def kv_bytes_per_request(self, num_tokens: int = 2048) -> int:
        """KV cache of one sequence of `num_tokens`."""
        return self.kv_bytes_per_token * num_tokens

    def num_slots(self, kv_cache_bytes: int) -> int:
        """Tokens whose keys and values fit into so many bytes (last column of Table 1)."""
        return kv_cache_bytes // self.kv_bytes_per_token

    def max_requests(self, kv_cache_bytes: int, num_tokens: int = 2048) -> int:
        """Sequences of `num_tokens` that fit, when each gets all of its slots at once."""
        return self.num_slots(kv_cache_bytes) // num_tokens


def _opt(name: str, num_layers: int, hidden_size: int, num_heads: int) -> ModelShape:
    return ModelShape(
        name, num_layers, hidden_size, num_heads, num_heads, hidden_size // num_heads, 4 * hidden_size, 50_272, 2_048,
        family="opt", tied_embeddings=True, source="OPT model card (Zhang et al. 2022)",
    )  # fmt: skip


OPT_13B = _opt("OPT-13B", 40, 5_120, 40)
OPT_66B = _opt("OPT-66B", 64, 9_216, 72)
OPT_175B = _opt("OPT-175B", 96, 12_288, 96)
LLAMA_13B = ModelShape("LLaMA-13B", 40, 5_120, 40, 40, 128, 13_824, 32_000, 2_048, source="LLaMA paper (Touvron et al. 2023)")
SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in (OPT_13B, OPT_66B, OPT_175B, LLAMA_13B)}

TABLE_1_KV_CACHE_BYTES: dict[str, int] = {"OPT-13B": 12 * GIB, "OPT-66B": 21 * GIB, "OPT-175B": 264 * GIB}
"""The paper's memory for the KV cache. Its numbers of slots come out only when its "GB" are read as GiB (and for 66B as 21.3 of them)."""
PAPER_NUM_SLOTS = OPT_13B.num_slots(TABLE_1_KV_CACHE_BYTES["OPT-13B"])
"""15,728: the slots of the paper's OPT-13B runs, with which Figure 2 is recomputed."""

A100_40GB = 40 * GB
PAPER_UTILIZATION = 0.95
"""Parameters (26 GB) and KV cache (12 GB) of Table 1 are this share of the card's 40 GB."""


@dataclass(frozen=True)
class MemoryLayout:
    """A card's memory, parted as a serving engine does: the parameters, then the KV cache up to `utilization` of the card; the rest is for activations and
    others.

    `card_bytes`: of all cards together, when the model is spread over several. Raises InvalidInput where the parameters alone do not fit.
    """

    shape: ModelShape
    card_bytes: int = A100_40GB
    utilization: float = PAPER_UTILIZATION

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise InvalidInput(f"utilization is {self.utilization}, but it is a share of the card: above 0 and at most 1")
        if self.kv_cache_bytes < 0:
            raise InvalidInput(
                f"{self.shape.name} has {self.parameters_bytes / GB:.1f} GB of parameters, but {self.utilization:.0%} of the card is only "
                f"{self.card_bytes * self.utilization / GB:.1f} GB: take a larger card or a smaller model"
            )

    @property
    def parameters_bytes(self) -> int:
        return self.shape.parameters_bytes

    @property
    def kv_cache_bytes(self) -> int:
        return int(self.card_bytes * self.utilization) - self.parameters_bytes

    @property
    def rest_bytes(self) -> int:
        return self.card_bytes - self.parameters_bytes - self.kv_cache_bytes

    @property
    def percentages(self) -> dict[str, float]:
        """Percent of the card: ``parameters``, ``kv_cache``, ``rest``; they sum to 100."""
        parts = {"parameters": self.parameters_bytes, "kv_cache": self.kv_cache_bytes, "rest": self.rest_bytes}
        return {name: 100 * size / self.card_bytes for name, size in parts.items()}

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots(self.kv_cache_bytes)
