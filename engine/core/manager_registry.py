"""Which manager serves which attention type. A new type is one spec, one manager and one line here."""

from __future__ import annotations

from typing import Any

from engine.core.block_pool import BlockPool
from engine.core.chunked_local_attention_manager import ChunkedLocalAttentionManager
from engine.core.cross_attention_manager import CrossAttentionManager
from engine.core.full_attention_manager import FullAttentionManager, RSWAManager, SinkFullAttentionManager
from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from engine.core.mamba_manager import MambaManager
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.core.sliding_window_manager import SlidingWindowManager
from engine.errors import InvalidInput

spec_manager_map: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    RSWASpec: RSWAManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
}
"""Spec type -> manager type. vLLM: KVCacheSpecRegistry."""

ZEROED_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Types whose new blocks the worker zeroes when some group keeps recurrent states: rubbish of another type could be a NaN."""


def get_manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """Raises InvalidInput for a type that no manager serves."""
    manager_class = spec_manager_map.get(type(kv_cache_spec))
    if manager_class is None:
        known = ", ".join(sorted({spec.kind for spec in spec_manager_map}))
        raise InvalidInput(f"attention type {kv_cache_spec.kind!r} has no KV-cache manager here: use one of {known}")
    return manager_class


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    block_pool: BlockPool,
    kv_cache_group_id: int,
    *,
    max_in_flight_tokens: int,
    max_model_len: int,
    has_mamba_layers: bool,
    **settings: Any,
) -> SingleTypeKVCacheManager:
    """A fresh manager for one group; `settings` as in SingleTypeKVCacheManager. vLLM: get_manager_for_kv_cache_spec."""
    return get_manager_class(kv_cache_spec)(
        kv_cache_spec,
        block_pool,
        kv_cache_group_id,
        max_admission_blocks=kv_cache_spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len),
        zero_new_blocks=has_mamba_layers and type(kv_cache_spec) in ZEROED_SPECS,
        **settings,
    )
