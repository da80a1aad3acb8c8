"""What a group of layers needs: one spec per attention type, groups of layers with equal specs, and the pool's size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from engine.errors import InvalidInput


@dataclass(frozen=True)
class KVCacheSpec:
    """Base of all attention types: `block_size` in tokens. Raises InvalidInput for a size below 1. vLLM: KVCacheSpec."""

    block_size: int
    kind: ClassVar[str] = "unknown"
    """Name in KV events (`kv_cache_spec_kind`)."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidInput(f"block_size is {self.block_size}, but a block holds at least 1 token")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer."""
        raise NotImplementedError

    @property
    def sliding_window(self) -> int | None:
        """Window in tokens, None where attention sees everything."""
        return None


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it. `dtype_bytes`: bytes per element. Raises InvalidInput for sizes below 1.

    vLLM: FullAttentionSpec; here: the width of the data type instead of a torch dtype."""

    num_kv_heads: int = 1
    head_size: int = 1
    dtype_bytes: int = 4
    kind: ClassVar[str] = "full_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_kv_heads", "head_size", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, but it must be at least 1")

    @property
    def page_size_bytes(self) -> int:
        """Keys and values of `block_size` tokens in one layer (R8.7)."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


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


def check_num_blocks(num_blocks: int) -> None:
    """Raises InvalidInput when a pool of `num_blocks` blocks would hold nothing besides the null block."""
    if num_blocks < 2:
        raise InvalidInput(f"num_blocks is {num_blocks}, but the pool needs at least 2: block 0 is the null block and holds no tokens")
