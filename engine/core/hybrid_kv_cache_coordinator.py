"""Several attention types over one pool: a hit is a length at which every group can go on (section 4 of the rules)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.block_hash import BlockHash
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_coordinator import CacheHit, CoordinatorSettings, KVCacheCoordinator
from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import InvalidInput


@dataclass
class SpecGroup:
    """KV-cache groups with equal specs: looked up together, so a hit is in all of them. vLLM: SpecGroup."""

    spec: KVCacheSpec
    group_ids: list[int]
    manager_class: type[SingleTypeKVCacheManager]
    block_size: int
    use_eagle: bool

    @property
    def is_full_attention(self) -> bool:
        """Whether every shorter prefix of a hit is a hit too."""
        return isinstance(self.spec, FullAttentionSpec)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """At least two different specs. Raises InvalidInput for a block size that is no multiple of the hash block size, for groups that are all alike, and for
    types that context parallelism cannot split. vLLM: HybridKVCacheCoordinator."""

    def __init__(self, kv_cache_config: KVCacheConfig, settings: CoordinatorSettings) -> None:
        super().__init__(kv_cache_config, settings)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        for manager in self.single_type_managers:
            if manager.block_size % self.hash_block_size:
                raise InvalidInput(
                    f"group {manager.kv_cache_group_id} has blocks of {manager.block_size} tokens, which hash_block_size {self.hash_block_size} does not divide"
                )
        if settings.dcp_world_size > 1 and not all(isinstance(spec, FullAttentionSpec | MambaSpec) for spec in specs):
            raise InvalidInput("context parallelism splits full attention only, and recurrent states are kept whole: leave other types out")
        self.enable_partial_hash_hits = settings.dcp_world_size == 1 and any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" and spec.block_size > self.hash_block_size for spec in specs
        )
        """Whether hits may end inside a block (R6.1)."""
        if settings.compat is None:
            self._check_combination(specs)
        self.attention_groups = self._split_by_spec()

    def _check_combination(self, specs: Sequence[KVCacheSpec]) -> None:
        """Default mode only: what would fail at the first lookup is refused, or done without hits inside blocks."""
        if any(isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) and spec.block_size > self.hash_block_size for spec in specs):
            self.enable_partial_hash_hits = False
        for group_id, spec in enumerate(specs):
            if isinstance(spec, ChunkedLocalAttentionSpec) and (spec.block_size != self.cache_hit_alignment_tokens or group_id in self.eagle_group_ids):
                raise InvalidInput(
                    f"group {group_id} is chunked local attention with blocks of {spec.block_size} tokens: beside other groups its block size must be "
                    f"that of the hits, {self.cache_hit_alignment_tokens}, and it cannot serve a draft head"
                )

    def _split_by_spec(self) -> list[SpecGroup]:
        found: list[SpecGroup] = []
        for group_id, (group, manager) in enumerate(zip(self.kv_cache_config.kv_cache_groups, self.single_type_managers, strict=True)):
            use_eagle = group_id in self.eagle_group_ids
            same = next((g for g in found if g.spec == group.kv_cache_spec), None)
            if same is None:
                found.append(SpecGroup(group.kv_cache_spec, [group_id], type(manager), manager.block_size, use_eagle))
            else:
                same.group_ids.append(group_id)
                same.use_eagle |= use_eagle
        if len(found) < 2:
            raise InvalidInput(f"all {len(self.single_type_managers)} KV-cache groups have the same spec: put their layers into one group")
        found.sort(key=lambda g: not g.is_full_attention)  # its walk from the left bounds what the others have to look at
        for spec_group in found:
            if spec_group.use_eagle:
                for group_id in spec_group.group_ids:
                    self.single_type_managers[group_id].use_eagle = True
        return found

    @property
    def cache_hit_alignment_tokens(self) -> int:
        """Hits are multiples of this many tokens: of the hash block size where they may end inside a block, else of the scheduler's block size."""
        return self.hash_block_size if self.enable_partial_hash_hits else self.scheduler_block_size

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Only whole scheduler blocks count, because hits end at their boundaries, unless hits may end inside blocks; a group with a draft head gets the
        block more that its hits look at and drop (R4.7)."""
        aligned = num_tokens if self.enable_partial_hash_hits else num_tokens // self.scheduler_block_size * self.scheduler_block_size
        for manager in self.single_type_managers:
            num_to_cache = min(num_tokens, aligned + manager.block_size) if manager.use_eagle and aligned else aligned
            manager.cache_blocks(request, num_to_cache, self.retention_interval)

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """Shrink one candidate length until all groups can serve it (R4.4). Each group either accepts it or gives a shorter one, so this ends."""
        num_groups = len(self.single_type_managers)
        blocks: list[list[KVCacheBlock]] = [[] for _ in range(num_groups)]
        first = self.attention_groups[0]
        full_length: list[int | None] = [None] * len(self.attention_groups)
        one_pass = len(self.attention_groups) == 2 and first.is_full_attention
        hit_length = max_cache_hit_length
        longest = 0
        dropped: set[int] = set()
        """Groups whose draft-head block was dropped at the present candidate length: once is enough."""
        while True:
            current = hit_length
            for index, group in enumerate(self.attention_groups):
                known = full_length[index]
                if group.is_full_attention and known is not None:
                    current = min(current, known)
                    continue
                drop = group.use_eagle and index not in dropped
                group_blocks, found = group.manager_class.find_longest_cache_hit(
                    block_hashes,
                    self._max_length(group, current, drop, max_cache_hit_length),
                    group.group_ids,
                    self.block_pool,
                    group.spec,
                    drop,
                    self.cache_hit_alignment_tokens,
                    self.settings.dcp_world_size if group.is_full_attention else 1,
                )
                if drop:
                    dropped.add(index)
                elif found < current:
                    dropped.clear()
                current = found
                if group.is_full_attention:
                    full_length[index] = found
                for group_id, hit in zip(group.group_ids, group_blocks, strict=True):
                    blocks[group_id] = hit
                longest = max(longest, current)
            if current >= hit_length:
                break
            hit_length = current
            if one_pass:
                break
        # Full attention was looked up once, for the first candidate. In compat mode only the first spec's hit is cut to what all can serve.
        for group in self.attention_groups if self.settings.compat is None else self.attention_groups[:1]:
            if group.is_full_attention:
                for group_id in group.group_ids:
                    del blocks[group_id][-(-hit_length // group.block_size) :]
        return CacheHit(tuple(blocks), hit_length, longest if longest > hit_length else 0)

    def _max_length(self, group: SpecGroup, current: int, drop: bool, max_cache_hit_length: int) -> int:
        """How far the group may look: past the candidate by what it will drop. Recurrent states drop nothing."""
        if not drop or isinstance(group.spec, MambaSpec):
            return current
        fine = self.enable_partial_hash_hits and group.manager_class.supports_fine_grained_hash_lookup
        return min(current + (min(self.hash_block_size, group.block_size) if fine else group.block_size), max_cache_hit_length)
