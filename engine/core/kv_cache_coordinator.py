"""Coordinators: one call to all groups, and what a hit means when there are several (section 4 of the rules).

Which one is built depends on the configuration alone (R4.1): without caching hits never exist; with one group its hit is the hit; several groups must agree
(`engine.core.hybrid_kv_cache_coordinator`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import AttentionSpec, ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.core.manager_registry import get_manager_for_kv_cache_spec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import EngineError, InvalidInput
from engine.trace.events import Cause, Emit

Blocks = Sequence[Sequence[KVCacheBlock]]
"""Blocks per group, in group order."""


@dataclass(frozen=True)
class CacheHit:
    """Hit blocks per group, the hit's length in tokens, and the junction: the longest hit of a single group if longer, else 0 (R4.5)."""

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    junction: int = 0


@dataclass(frozen=True)
class CoordinatorSettings:
    """`hash_block_size`: tokens per hash. `scheduler_block_size`: granularity of hits in a hybrid, a multiple of every block size and of the hash block
    size. `max_in_flight_tokens`: bounds what the full-sequence gate counts for windows and chunks (R3.4). `use_eagle`: the last matched block is dropped in
    the groups that are flagged, or in all if none is. `retention_interval`: see SingleTypeKVCacheManager.cache_blocks. `compat`: see engine.core.compat."""

    enable_caching: bool
    hash_block_size: int
    scheduler_block_size: int
    max_model_len: int
    max_in_flight_tokens: int
    use_eagle: bool = False
    retention_interval: int | None = None
    dcp_world_size: int = 1
    enable_kv_cache_events: bool = False
    emit: Emit | None = None
    compat: str | None = None


class KVCacheCoordinator(ABC):
    """Owns the pool and one manager per group; passes calls on in group order. Raises InvalidInput for settings that do not go together.
    vLLM: KVCacheCoordinator."""

    def __init__(self, kv_cache_config: KVCacheConfig, settings: CoordinatorSettings) -> None:
        check_settings(kv_cache_config, settings)
        self.kv_cache_config = kv_cache_config
        self.settings = settings
        self.enable_caching = settings.enable_caching
        self.hash_block_size = settings.hash_block_size
        self.scheduler_block_size = settings.scheduler_block_size
        self.retention_interval = settings.retention_interval
        groups = kv_cache_config.kv_cache_groups
        flagged = {group_id for group_id, group in enumerate(groups) if group.is_eagle_group}
        self.eagle_group_ids = set(range(len(groups))) if settings.use_eagle and not flagged else flagged
        """Groups whose last matched block is dropped (R3.10)."""
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            settings.enable_caching,
            settings.hash_block_size,
            enable_kv_cache_events=settings.enable_kv_cache_events,
            emit=settings.emit,
            compat=settings.compat,
        )
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            [
                get_manager_for_kv_cache_spec(
                    group.kv_cache_spec,
                    self.block_pool,
                    group_id,
                    max_in_flight_tokens=settings.max_in_flight_tokens,
                    max_model_len=settings.max_model_len,
                    has_mamba_layers=kv_cache_config.has_mamba_layers,
                    scheduler_block_size=settings.scheduler_block_size,
                    dcp_world_size=settings.dcp_world_size,
                    emit=settings.emit,
                )
                for group_id, group in enumerate(groups)
            ]
        )

    # ------------------------------------------------------------------ how much is needed
    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Blocks,
        num_computed_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
        apply_admission_cap: bool = False,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Sum over the groups (R3.3); cross attention counts the encoder's tokens instead. `apply_admission_cap`: bounded per group by R3.4."""
        total = 0
        for manager, hit in zip(self.single_type_managers, new_computed_blocks, strict=True):
            if manager.holds_encoder_output:
                total += manager.get_num_blocks_to_allocate(request_id, num_encoder_tokens, (), 0, num_encoder_tokens, apply_admission_cap)
            else:
                total += manager.get_num_blocks_to_allocate(
                    request_id, num_tokens, hit, num_computed_tokens, num_tokens_main_model, apply_admission_cap, num_external_computed_tokens
                )
        return total

    # ------------------------------------------------------------------ passing on
    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: Blocks, num_computed_tokens: int, num_external_computed_tokens: int = 0
    ) -> None:
        """Adopt the hits of all groups before any group allocates, so that none takes another's hit, then make room for what a KV connector brings (R5.3 e).
        Raises EngineError, changing nothing, for a request that runs already."""
        if any(request_id in manager.num_cached_block for manager in self.single_type_managers):
            raise EngineError(f"request {request_id} runs already and cannot adopt further blocks")
        for manager, hit in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, hit, num_computed_tokens, num_external_computed_tokens)
        if num_external_computed_tokens:
            for manager in self.single_type_managers:
                manager.allocate_external_computed_blocks(request_id, num_computed_tokens, num_external_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int, num_encoder_tokens: int = 0) -> tuple[list[KVCacheBlock], ...]:
        """New blocks per group so that `num_tokens` slots exist (R5.3 f)."""
        return tuple(
            [
                manager.allocate_new_blocks(request_id, num_encoder_tokens if manager.holds_encoder_output else num_tokens, num_tokens_main_model)
                for manager in self.single_type_managers
            ]
        )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register what `num_tokens` tokens fill, in every group (R3.6)."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_tokens, self.retention_interval)

    def free(self, request_id: str, cause: Cause | None = None) -> None:
        """Free the request's blocks, group by group (R1.9)."""
        for manager in self.single_type_managers:
            manager.free(request_id, cause)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int) -> None:
        """Release what attention will never read again, in every group (R3.2)."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, num_processed_tokens, num_prompt_tokens)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Common leading blocks per group, read off the table of one running request (R3.11)."""
        return [manager.get_num_common_prefix_blocks(running_request_id) for manager in self.single_type_managers]

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's block table per group: the live lists, do not change them."""
        return tuple([manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers])

    def new_step_starts(self) -> None:
        """A new engine step begins."""
        for manager in self.single_type_managers:
            manager.new_step_starts()

    @property
    def cache_hit_alignment_tokens(self) -> int:
        """Hits are multiples of this many tokens."""
        return self.scheduler_block_size

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
        return CacheHit(tuple([[] for _ in self.single_type_managers]), 0)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group, whose block size is the hash block size (R4.1), so that no entry ends inside a block. Raises InvalidInput when it is not.
    vLLM: UnitaryKVCacheCoordinator."""

    def __init__(self, kv_cache_config: KVCacheConfig, settings: CoordinatorSettings) -> None:
        super().__init__(kv_cache_config, settings)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size = spec.block_size * settings.dcp_world_size
        if settings.hash_block_size != self.block_size:
            raise InvalidInput(f"hash_block_size is {settings.hash_block_size}, but a single KV-cache group is hashed at its own block size, {self.block_size}")
        self.single_type_managers[0].use_eagle = 0 in self.eagle_group_ids
        if settings.compat is None:
            self._check_spec(spec)

    def _check_spec(self, spec: KVCacheSpec) -> None:
        """Default mode only: what would fail at the first lookup is refused."""
        if isinstance(spec, ChunkedLocalAttentionSpec) and self.eagle_group_ids:
            raise InvalidInput("chunked local attention cannot serve a draft head: leave use_eagle out, or choose another attention type")
        if isinstance(spec, ChunkedLocalAttentionSpec | SlidingWindowSpec) and self.settings.dcp_world_size > 1:
            raise InvalidInput(f"context parallelism cannot split {spec.kind}: set dcp_world_size to 1, or choose another attention type")

    @property
    def cache_hit_alignment_tokens(self) -> int:
        """Those of the group's blocks."""
        return self.block_size

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int) -> CacheHit:
        """The group's own hit."""
        manager = self.single_type_managers[0]
        blocks, num_tokens = manager.find_longest_cache_hit(
            block_hashes,
            max_cache_hit_length,
            (0,),
            self.block_pool,
            manager.kv_cache_spec,
            0 in self.eagle_group_ids,
            self.block_size,
            self.settings.dcp_world_size,
        )
        return CacheHit(blocks, num_tokens)


def check_settings(kv_cache_config: KVCacheConfig, settings: CoordinatorSettings) -> None:
    """Raises InvalidInput for block sizes that do not divide the scheduler's, for recurrent states that chunks cannot be cut for (R3.44; not in compat mode),
    and for a retention interval that no group can use or that is no multiple of the scheduler's block size (R3.21)."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    scheduler_block_size = settings.scheduler_block_size
    for size, name in [(settings.hash_block_size, "hash_block_size"), *((size, "the block size of a group") for size in sizes)]:
        if size < 1 or scheduler_block_size % size:
            raise InvalidInput(f"{name} is {size}, which does not divide scheduler_block_size, {scheduler_block_size}: give a multiple of all block sizes")
    states = {(spec.mamba_cache_mode, spec.block_size) for spec in (g.kv_cache_spec for g in kv_cache_config.kv_cache_groups) if isinstance(spec, MambaSpec)}
    if settings.compat is None and len(states) > 1 and any(mode == "align" for mode, _ in states):
        raise InvalidInput(
            f"groups of recurrent states differ in mode or block size, {sorted(states)}: where states are kept at the ends of prefill chunks (align), "
            "chunks are cut for one block size, so give all such groups the same"
        )
    interval = settings.retention_interval
    if interval is None:
        return
    if not any(isinstance(group.kv_cache_spec, SlidingWindowSpec | MambaSpec) for group in kv_cache_config.kv_cache_groups):
        raise InvalidInput("retention_interval is set, but no group has a sliding window or recurrent states, so it has no effect: leave it out")
    if interval < 0 or interval % scheduler_block_size:
        raise InvalidInput(f"retention_interval is {interval}, but it must be 0 or a multiple of scheduler_block_size, {scheduler_block_size}")


def resolve_block_sizes(
    kv_cache_config: KVCacheConfig, hash_block_size: int | None = None, scheduler_block_size: int | None = None, dcp_world_size: int = 1
) -> tuple[int, int]:
    """(scheduler_block_size, hash_block_size) where they are not given: the least common multiple of the groups' block sizes, and their greatest common
    divisor, attention groups counted `dcp_world_size` times (R2.6). vLLM: resolve_kv_cache_block_sizes, whose `prefix_match_unit` is `hash_block_size` here.
    Here: always the divisor; there the hashes get coarser when states have a block size of their own."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [spec.block_size * dcp_world_size if isinstance(spec, AttentionSpec) or len(specs) == 1 else spec.block_size for spec in specs]
    return scheduler_block_size or lcm(*sizes), hash_block_size or gcd(*sizes)
