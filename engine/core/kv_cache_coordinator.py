"""Coordinators: one call to all groups, and what a hit means when there are several (section 4 of the rules).

Which one is built depends on the configuration alone (R4.1): without caching hits never exist; with one group its hit is the hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.manager_registry import get_manager_for_kv_cache_spec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import InvalidInput
from engine.trace.events import Cause, Emit


@dataclass(frozen=True)
class CacheHit:
    """Hit blocks per group, the hit's length in tokens, and the junction: the longest hit of a single group if longer, else 0 (R4.5)."""

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    junction: int = 0


class KVCacheCoordinator(ABC):
    """Owns the pool and one manager per group; passes calls on in group order. vLLM: KVCacheCoordinator."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_caching: bool,
        hash_block_size: int,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        emit: Emit | None = None,
        strict: bool = True,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        groups = kv_cache_config.kv_cache_groups
        flagged = {group_id for group_id, group in enumerate(groups) if group.is_eagle_group}
        self.eagle_group_ids = set(range(len(groups))) if use_eagle and not flagged else flagged
        """Groups whose last matched block is dropped: those that are flagged, or all when `use_eagle` is on and none is (R3.10)."""
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, enable_caching, hash_block_size, enable_kv_cache_events=enable_kv_cache_events, emit=emit, strict=strict
        )
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            get_manager_for_kv_cache_spec(group.kv_cache_spec, self.block_pool, group_id, emit=emit)
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        )

    # ------------------------------------------------------------------ how much is needed
    def get_num_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
        total_computed_tokens: int,
        *,
        apply_admission_cap: bool = False,
    ) -> int:
        """Sum over the groups of the blocks to take from the queue (R3.3). `apply_admission_cap`: bounded per group by R3.4, less what is hit."""
        total = 0
        for manager, hit in zip(self.single_type_managers, new_computed_blocks, strict=True):
            num_new = manager.get_num_new_blocks(request_id, num_tokens, hit, total_computed_tokens)
            cap = manager.get_max_admission_blocks() if apply_admission_cap else None
            total += num_new if cap is None else min(num_new, cap)
        return total

    def get_num_evictable_blocks(self, new_computed_blocks: Sequence[Sequence[KVCacheBlock]], total_computed_tokens: int) -> int:
        """Sum over the groups of the hit blocks that leave the free queue when they are adopted (R3.3)."""
        return sum(
            manager.get_num_evictable_blocks(hit, total_computed_tokens) for manager, hit in zip(self.single_type_managers, new_computed_blocks, strict=True)
        )

    # ------------------------------------------------------------------ passing on
    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Sequence[KVCacheBlock]], total_computed_tokens: int) -> None:
        """Adopt the hits of all groups before any group allocates, so that none takes another's hit (R5.3 e)."""
        for manager, hit in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, hit, total_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """New blocks per group so that `num_tokens` slots exist (R5.3 f)."""
        return tuple([manager.allocate_new_blocks(request_id, num_tokens) for manager in self.single_type_managers])

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register what `num_tokens` tokens fill, in every group (R3.6)."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str, cause: Cause | None = None) -> None:
        """Free the request's blocks, group by group (R1.9)."""
        for manager in self.single_type_managers:
            manager.free(request_id, cause)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Release what attention will never read again, in every group (R3.2)."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Common leading blocks per group, read off the table of one running request (R3.11)."""
        return [manager.get_num_common_prefix_blocks(running_request_id) for manager in self.single_type_managers]

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's block table per group: the live lists, do not change them."""
        return tuple(manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers)

    def new_step_starts(self) -> None:
        """A new engine step begins."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The longest hit of at most `max_cache_hit_length` tokens that all groups can adopt. Changes nothing."""


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Caching is off: any number of groups, never a hit. vLLM: KVCacheCoordinatorNoPrefixCache."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """0 for every group: nothing is shared (R3.11)."""
        return [0] * len(self.single_type_managers)

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """Always empty."""
        return CacheHit(tuple([] for _ in self.single_type_managers), 0)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group, whose block size is the hash block size (R4.1), so that no entry ends inside a block. vLLM: UnitaryKVCacheCoordinator."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The group's own hit."""
        manager = self.single_type_managers[0]
        blocks = manager.find_longest_cache_hit(
            block_hashes, max_cache_hit_length, (0,), self.block_pool, manager.kv_cache_spec, 0 in self.eagle_group_ids, manager.block_size
        )
        return CacheHit(blocks, len(blocks[0]) * manager.block_size)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig,
    *,
    enable_caching: bool,
    hash_block_size: int,
    use_eagle: bool = False,
    enable_kv_cache_events: bool = False,
    emit: Emit | None = None,
    strict: bool = True,
) -> KVCacheCoordinator:
    """The coordinator for this configuration (R4.1). Raises InvalidInput for several groups with caching, and for one group whose block size is not
    the hash block size. vLLM: get_kv_cache_coordinator."""
    coordinator: type[KVCacheCoordinator]
    if not enable_caching:
        coordinator = KVCacheCoordinatorNoPrefixCache
    elif len(kv_cache_config.kv_cache_groups) == 1:
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if hash_block_size != block_size:
            raise InvalidInput(f"hash_block_size is {hash_block_size}, but a single KV-cache group is hashed at its own block size, {block_size}")
        coordinator = UnitaryKVCacheCoordinator
    else:
        raise InvalidInput(
            f"{len(kv_cache_config.kv_cache_groups)} KV-cache groups cannot share a prefix cache here: use one group, or turn prefix caching off"
        )
    return coordinator(
        kv_cache_config,
        enable_caching=enable_caching,
        hash_block_size=hash_block_size,
        use_eagle=use_eagle,
        enable_kv_cache_events=enable_kv_cache_events,
        emit=emit,
        strict=strict,
    )
