"""Which manager serves which attention type. A new type is one spec, one manager and one line here."""

from __future__ import annotations

from engine.core.block_pool import BlockPool
from engine.core.full_attention_manager import FullAttentionManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import InvalidInput
from engine.trace.events import Emit

spec_manager_map: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {FullAttentionSpec: FullAttentionManager}
"""Spec type -> manager type. vLLM: spec_manager_map."""


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """Raises InvalidInput for a type that no manager serves."""
    manager_class = spec_manager_map.get(type(kv_cache_spec))
    if manager_class is None:
        known = ", ".join(sorted(spec.kind for spec in spec_manager_map))
        raise InvalidInput(f"attention type {kv_cache_spec.kind!r} has no KV-cache manager here: use one of {known}")
    return manager_class


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec, block_pool: BlockPool, kv_cache_group_id: int, *, emit: Emit | None = None
) -> SingleTypeKVCacheManager:
    """A fresh manager for one group. vLLM: get_manager_for_kv_cache_spec."""
    return get_manager_class(kv_cache_spec)(kv_cache_spec, block_pool, kv_cache_group_id, emit=emit)
