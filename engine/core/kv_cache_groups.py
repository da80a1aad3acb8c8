"""From a model's layers to its KV-cache groups (R4.2).

All groups share one pool, so a block must take the same number of bytes in each: pages of equal size, and equally many layers. A model with 10 full and 20
sliding-window layers therefore has three groups of 10, not two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.core.kv_cache_spec import KVCacheGroupSpec, KVCacheSpec, MambaSpec, ceil_div
from engine.errors import InvalidInput


def get_kv_cache_groups(kv_cache_specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Groups of the layers, given as layer name -> spec in the order of the model. Raises InvalidInput without a layer, and where pages cannot be made equal.

    vLLM: get_kv_cache_groups; here: no layers of unequal shape within a group, no draft model's layers."""
    if not kv_cache_specs:
        raise InvalidInput("the model has no layer with a KV cache, so there is nothing to group")
    specs = unify_page_sizes(kv_cache_specs)
    buckets: dict[KVCacheSpec, list[str]] = {}
    for layer_name, spec in specs.items():
        buckets.setdefault(spec, []).append(layer_name)
    fewest, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    # Where the numbers are close, a few padding layers cost less than a group more per type.
    group_size = most if most < 1.5 * fewest else fewest
    groups: list[KVCacheGroupSpec] = []
    for spec, layer_names in buckets.items():
        num_groups = ceil_div(len(layer_names), group_size)
        # Every num_groups-th layer, so that a pipeline stage with part of the layers has part of each group.
        groups += [KVCacheGroupSpec(layer_names[first::num_groups], spec) for first in range(num_groups)]
    return groups


def unify_page_sizes(kv_cache_specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers with pages of equal size: smaller ones get more tokens per block, recurrent states are padded. Raises InvalidInput where the largest
    page is no multiple of another. vLLM: unify_kv_cache_spec_page_size."""
    largest = max(spec.page_size_bytes for spec in kv_cache_specs.values())
    unified: dict[str, KVCacheSpec] = {}
    for layer_name, spec in kv_cache_specs.items():
        if isinstance(spec, MambaSpec):
            unified[layer_name] = replace(spec, page_size_padded=largest) if spec.page_size_bytes < largest else spec
        elif largest % spec.page_size_bytes:
            raise InvalidInput(
                f"layer {layer_name} has pages of {spec.page_size_bytes} bytes, of which the largest page, {largest} bytes, is no multiple: "
                "choose block sizes that make them equal"
            )
        else:
            unified[layer_name] = replace(spec, block_size=spec.block_size * (largest // spec.page_size_bytes))
    return unified
