"""Which coordinator serves which configuration (R4.1)."""

from __future__ import annotations

from engine.core.hybrid_kv_cache_coordinator import HybridKVCacheCoordinator
from engine.core.kv_cache_coordinator import (
    CoordinatorSettings,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from engine.core.kv_cache_spec import KVCacheConfig


def get_kv_cache_coordinator(kv_cache_config: KVCacheConfig, settings: CoordinatorSettings) -> KVCacheCoordinator:
    """The coordinator for this configuration (R4.1). Raises InvalidInput as the coordinators do. vLLM: get_kv_cache_coordinator."""
    if not settings.enable_caching:
        return KVCacheCoordinatorNoPrefixCache(kv_cache_config, settings)
    if len(kv_cache_config.kv_cache_groups) == 1:
        return UnitaryKVCacheCoordinator(kv_cache_config, settings)
    return HybridKVCacheCoordinator(kv_cache_config, settings)
