"""What a group of layers needs: one spec per attention type, groups of layers with equal specs, and the pool's size.

Two specs are equal when all their fields are; groups with equal specs are looked up together (R4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from engine.errors import InvalidInput

MAMBA_CACHE_MODES = ("all", "align", "none")


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of all attention types: `block_size` in tokens. Raises InvalidInput for a size below 1. vLLM: KVCacheSpec."""

    block_size: int
    kind: ClassVar[str] = "unknown"
    """Name in KV events (`kv_cache_spec_kind`)."""

    def __post_init__(self) -> None:
        check_sizes(self, "block_size")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer."""
        raise NotImplementedError

    @property
    def event_sliding_window(self) -> int | None:
        """Window in tokens as KV events name it, None where attention sees everything."""
        return None

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """What a whole sequence can hold at most at one time (R3.4), None without such a bound."""
        return None


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values per token. `dtype_bytes`: bytes per element. Raises InvalidInput for sizes below 1.

    vLLM: AttentionSpec; here: the width of the data type instead of a torch dtype."""

    num_kv_heads: int = 1
    head_size: int = 1
    dtype_bytes: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, "block_size", "num_kv_heads", "head_size", "dtype_bytes")

    @property
    def page_size_bytes(self) -> int:
        """Keys and values of `block_size` tokens in one layer (R8.7)."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all before it. vLLM: FullAttentionSpec."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: managed like full attention, but a token leaves one latent of `head_size` elements instead of keys and values, so
    what changes is the size of a page. vLLM: MLAAttentionSpec."""

    kind: ClassVar[str] = "mla_attention"

    @property
    def page_size_bytes(self) -> int:
        """One latent per token in one layer."""
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window: the prompt stays in sight, of the outputs only the last `rswa_window` tokens (R3.50). Raises InvalidInput for a window
    below 1. vLLM: RSWASpec."""

    rswa_window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "rswa_window")


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention whose first `sink_len` tokens live in blocks that the group takes for itself (R1.16). Raises InvalidInput unless they fill whole
    blocks. vLLM: SinkFullAttentionSpec."""

    sink_len: int = 0
    kind: ClassVar[str] = "sink_full_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_len < 1 or self.sink_len % self.block_size:
            raise InvalidInput(f"sink_len is {self.sink_len}, but sink tokens fill whole blocks: give a multiple of the block size, {self.block_size}")


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to itself and the `sliding_window` - 1 before it (R3.20). Raises InvalidInput for a window below 1. vLLM: SlidingWindowSpec."""

    sliding_window: int = 1
    kind: ClassVar[str] = "sliding_window"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "sliding_window")

    @property
    def event_sliding_window(self) -> int | None:
        """The window."""
        return self.sliding_window

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """The window's past, what is in flight, and one block more because a window need not begin at a block's start (R3.4)."""
        return ceil_div(min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends only within its own chunk of `attention_chunk_size` tokens (R3.30). Raises InvalidInput for a chunk below 1.
    vLLM: ChunkedLocalAttentionSpec."""

    attention_chunk_size: int = 1
    kind: ClassVar[str] = "chunked_local_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "attention_chunk_size")

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """One chunk and what is in flight (R3.4)."""
        return ceil_div(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """One block holds one recurrent state, whatever its `block_size`, which only says at which positions states are kept.

    `mamba_cache_mode`: ``all`` keeps a state per block, ``align`` those at which prefill chunks end, ``none`` one per request (R3.40 to R3.44).
    `num_speculative_blocks`: further states for draft tokens. `page_size_padded`: bytes, to be as large as other groups' pages. `shapes`: of the state's
    tensors, elements. Raises InvalidInput for another mode or a negative number. vLLM: MambaSpec; here: the width of the data type instead of torch dtypes."""

    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    dtype_bytes: int = 4
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    page_size_padded: int | None = None
    kind: ClassVar[str] = "mamba"

    def __post_init__(self) -> None:
        check_sizes(self, "block_size", "dtype_bytes")
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            raise InvalidInput(f"unknown mamba_cache_mode {self.mamba_cache_mode!r}: choose one of {', '.join(MAMBA_CACHE_MODES)}")
        if self.num_speculative_blocks < 0:
            raise InvalidInput(f"num_speculative_blocks is {self.num_speculative_blocks}, but it cannot be negative")

    @property
    def page_size_bytes(self) -> int:
        """One state in one layer, the same for any block size."""
        return self.page_size_padded or sum(prod(shape) for shape in self.shapes) * self.dtype_bytes


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output: one allocation per request, never shared. vLLM: CrossAttentionSpec."""

    kind: ClassVar[str] = "cross_attention"


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table. vLLM: KVCacheGroupSpec."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool (`num_blocks`, the null block included) and its groups. Raises InvalidInput for a pool without a usable block or without a group.

    vLLM: KVCacheConfig; here: no tensors, those are the worker's."""

    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_num_blocks(self.num_blocks)
        if not self.kv_cache_groups:
            raise InvalidInput("there is no KV-cache group: name at least one group of layers")

    @property
    def has_mamba_layers(self) -> bool:
        """Whether some group keeps recurrent states; then the worker zeroes new attention blocks, because states share their pages."""
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in self.kv_cache_groups)


def check_num_blocks(num_blocks: int) -> None:
    """Raises InvalidInput when a pool of `num_blocks` blocks would hold nothing besides the null block."""
    if num_blocks < 2:
        raise InvalidInput(f"num_blocks is {num_blocks}, but the pool needs at least 2: block 0 is the null block and holds no tokens")


def check_sizes(spec: KVCacheSpec, *names: str) -> None:
    """Raises InvalidInput for a field below 1."""
    for name in names:
        value = getattr(spec, name)
        if value < 1:
            reason = "a block holds at least 1 token" if name == "block_size" else "it must be at least 1"
            raise InvalidInput(f"{name} is {value}, but {reason}")


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient, rounded up."""
    return -(-numerator // denominator)
