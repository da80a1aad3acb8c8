"""KV-cache groups as a scenario names them: the kind of attention, and what that kind needs to know.

A group is a set of layers that share one block table. Real vLLM derives groups from a model's layers; a run without a model says which ones it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from engine.core.kv_cache_spec import (
    MAMBA_CACHE_MODES,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from engine.errors import InvalidInput

GROUP_TYPES = ("full", "mla", "sliding_window", "chunked_local", "mamba", "rswa")

NEEDED: dict[str, str] = {
    "sliding_window": "sliding_window",
    "chunked_local": "attention_chunk_size",
    "rswa": "rswa_window",
    "mamba": "mamba_cache_mode",
}
"""Type -> the one field that it cannot do without."""

ONLY_FOR: dict[str, tuple[str, ...]] = {
    "sliding_window": ("sliding_window",),
    "attention_chunk_size": ("chunked_local",),
    "rswa_window": ("rswa",),
    "mamba_cache_mode": ("mamba",),
    "num_speculative_blocks": ("mamba",),
    "num_state_elements": ("mamba",),
    "num_kv_heads": ("full", "mla", "sliding_window", "chunked_local", "rswa"),
    "head_size": ("full", "mla", "sliding_window", "chunked_local", "rswa"),
}
"""Field -> the types for which it means something; fields not named here mean something for all."""


@dataclass(frozen=True)
class GroupConfig:
    """One group of layers. Sizes in tokens; `block_size` None: the session's. What a type does not use stays None.

    `num_kv_heads`, `head_size`, `num_state_elements` and `dtype_bytes` decide nothing but the size of a page. `layer_names` is what the group is called.
    Of a model's own groups, `state_shapes` are those of a recurrent state's tensors, instead of `num_state_elements`, and `page_size_padded` the bytes of a
    page that is larger than what lies in it, to be as large as other groups' pages.
    Raises InvalidInput for an unknown type, a size below 1, a field that the type lacks, and one that it has no use for.
    """

    type: str = "full"
    block_size: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    rswa_window: int | None = None
    mamba_cache_mode: str | None = None
    num_speculative_blocks: int | None = None
    is_eagle_group: bool = False
    num_kv_heads: int | None = None
    head_size: int | None = None
    num_state_elements: int | None = None
    dtype_bytes: int | None = None
    layer_names: tuple[str, ...] = ()
    state_shapes: tuple[tuple[int, ...], ...] = ()
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        for _, message in group_problems(self):
            raise InvalidInput(message)


def group_problems(group: Any) -> list[tuple[str, str]]:
    """Field and sentence for everything that is wrong with a group of these fields taken by itself (a GroupConfig, or a part of a scenario)."""
    if group.type not in GROUP_TYPES:
        return [("type", f"there is no group of the type “{group.type}”; choose one of {', '.join(GROUP_TYPES)}")]
    found: list[tuple[str, str]] = []
    needed = NEEDED.get(group.type)
    if needed is not None and getattr(group, needed) is None:
        found.append((needed, f"a group of the type “{group.type}” needs {needed}; add it"))
    for name, types in ONLY_FOR.items():
        if getattr(group, name) is not None and group.type not in types:
            found.append((name, f"a group of the type “{group.type}” has no {name}; leave it out, or take the type {' or '.join(types)}"))
    for name in ("block_size", "sliding_window", "attention_chunk_size", "rswa_window", "num_kv_heads", "head_size", "num_state_elements", "dtype_bytes"):
        value = getattr(group, name)
        if value is not None and value < 1:
            found.append((name, f"{name} is {value}, but it must be at least 1"))
    if group.num_speculative_blocks is not None and group.num_speculative_blocks < 0:
        found.append(("num_speculative_blocks", f"num_speculative_blocks is {group.num_speculative_blocks}, but it cannot be negative"))
    if group.mamba_cache_mode is not None and group.mamba_cache_mode not in MAMBA_CACHE_MODES:
        message = f"there is no mamba_cache_mode “{group.mamba_cache_mode}”; choose one of {', '.join(MAMBA_CACHE_MODES)}"
        found.append(("mamba_cache_mode", message))
    return found


def group_specs(groups: Sequence[GroupConfig], block_size: int) -> list[KVCacheGroupSpec]:
    """The groups as the core takes them; no groups are one full-attention group. `block_size` for those that do not set their own."""
    named = groups or (GroupConfig(),)
    names = [list(group.layer_names) or ["layers" if len(named) == 1 else f"{group.type}.{group_id}"] for group_id, group in enumerate(named)]
    return [
        KVCacheGroupSpec(layer_names=layer_names, kv_cache_spec=kv_cache_spec(group, block_size), is_eagle_group=group.is_eagle_group)
        for group, layer_names in zip(named, names, strict=True)
    ]


def kv_cache_spec(group: GroupConfig, block_size: int) -> KVCacheSpec:
    """What the group's layers need. `block_size` when it does not set its own."""
    size = group.block_size or block_size
    width = group.dtype_bytes or 4
    if group.type == "mamba":
        return MambaSpec(
            block_size=size,
            shapes=group.state_shapes or ((group.num_state_elements or 1,),),
            dtype_bytes=width,
            mamba_cache_mode=group.mamba_cache_mode or "none",
            num_speculative_blocks=group.num_speculative_blocks or 0,
            page_size_padded=group.page_size_padded,
        )
    attention: dict[str, int] = {"block_size": size, "num_kv_heads": group.num_kv_heads or 1, "head_size": group.head_size or 1, "dtype_bytes": width}
    if group.type == "sliding_window":
        return SlidingWindowSpec(**attention, sliding_window=group.sliding_window or 1)
    if group.type == "chunked_local":
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.attention_chunk_size or 1)
    if group.type == "rswa":
        return RSWASpec(**attention, rswa_window=group.rswa_window or 1)
    return MLAAttentionSpec(**attention) if group.type == "mla" else FullAttentionSpec(**attention)


def describe(group: KVCacheGroupSpec) -> dict[str, Any]:
    """A group as plain data for a trace's header: what it is, the size of its blocks in tokens and of its pages in bytes, and what its kind adds."""
    spec = group.kv_cache_spec
    described: dict[str, Any] = {
        "kind": "rswa" if isinstance(spec, RSWASpec) else spec.kind,
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
        "layer_names": list(group.layer_names),
        "is_eagle_group": group.is_eagle_group,
    }
    for name in ("sliding_window", "attention_chunk_size", "rswa_window", "mamba_cache_mode", "num_speculative_blocks"):
        if hasattr(spec, name):
            described[name] = getattr(spec, name)
    return described


def resolve_kv_cache_block_sizes(
    specs: Sequence[KVCacheSpec], block_size: int, *, dcp_world_size: int = 1, prefix_match_unit: int | None = None, hashing: bool = True
) -> tuple[int, int]:
    """Tokens on which hits must end (scheduler_block_size) and tokens per prefix hash (hash_block_size), R2.6.

    `block_size` is the session's; attention groups count it `dcp_world_size` times. Without `hashing` nobody asks for finer hashes.
    Raises InvalidInput when `prefix_match_unit` does not divide every group's block size. vLLM: resolve_kv_cache_block_sizes."""
    sizes = [spec.block_size * (1 if isinstance(spec, MambaSpec) else dcp_world_size) for spec in specs]
    if len(sizes) == 1:
        if prefix_match_unit not in (None, sizes[0]):
            raise InvalidInput(f"prefix_match_unit is {prefix_match_unit}, but a single group is hashed by its own blocks of {sizes[0]} tokens; leave it out")
        return sizes[0], sizes[0]
    scheduler_block_size = lcm(*sizes)
    if not hashing or any(isinstance(spec, MambaSpec) and spec.block_size != block_size for spec in specs):
        return scheduler_block_size, scheduler_block_size
    hash_block_size = prefix_match_unit or gcd(*sizes)
    for size in sizes:
        if size % hash_block_size:
            raise InvalidInput(f"prefix_match_unit is {hash_block_size}, but it must divide the block size of every group, and {size} is one of them")
    return scheduler_block_size, hash_block_size
