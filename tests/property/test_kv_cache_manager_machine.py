"""The KV-cache manager without a scheduler: any order of lookups, allocations, steps, ends, evictions and late releases, for every mix of groups.

Each allocation is a step of its own: the dumb model runs it at once. What the scheduler never does is done here too: draft slots, caching by hand, a model
with an encoder, blocks that wait for a copy over several steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from engine.core.mamba_split import MambaBlockAlignedSplit
from engine.core.output import SamplingParams
from engine.core.request import Request, RequestStatus
from engine.errors import EngineError, InvalidInput
from engine.trace.events import Event
from tests.property.block_books import check_books
from tests.property.dumb_model import DumbModel, Work
from tests.property.fold import fold
from tests.property.group_mixes import MAX_MODEL_LEN, Mix, mixes
from tests.property.plain_state import PlainState, read_manager


class ManagerMachine(RuleBasedStateMachine):
    """`waiting`, `running`: requests by id; `over`: the ended ones. `retained`: blocks of copies that are done but not let go."""

    @initialize(
        data=st.data(),
        enable_caching=st.sampled_from([True, True, True, True, False]),
        recording=st.booleans(),
        num_spare=st.sampled_from([12, 20, 30, 6, 2]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        max_in_flight_tokens=st.sampled_from([None, 4, 9]),
        has_encoder=st.booleans(),
    )
    def build(
        self,
        data: st.DataObject,
        enable_caching: bool,
        recording: bool,
        num_spare: int,
        watermark: float,
        max_in_flight_tokens: int | None,
        has_encoder: bool,
    ) -> None:
        mix: Mix = data.draw(mixes(enable_caching))
        self.has_encoder = has_encoder and not enable_caching
        if self.has_encoder:
            mix = replace(mix, groups=[*mix.groups, KVCacheGroupSpec(["cross"], CrossAttentionSpec(2))])
        self.told: PlainState | None = None
        self.retained: list[KVCacheBlock] = []
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.over: dict[str, Request] = {}
        self.outputs: dict[str, int] = {}
        try:
            self.manager = KVCacheManager(
                KVCacheConfig(1 + mix.num_for_one_token + num_spare, mix.groups),
                MAX_MODEL_LEN,
                hash_block_size=mix.hash_block_size,
                max_in_flight_tokens=max_in_flight_tokens,
                enable_caching=enable_caching,
                use_eagle=mix.use_eagle,
                watermark=watermark,
                retention_interval=mix.retention_interval if enable_caching else None,
                emit=self.hear if recording else None,
            )
        except InvalidInput:
            assume(False)
        coordinator = self.manager.coordinator
        self.hasher = BlockHasher(coordinator.hash_block_size, "sha256_cbor") if enable_caching else None
        self.model = DumbModel(mix.specs)
        self.pool = self.manager.block_pool
        self.num_unused = self.pool.get_num_free_blocks()
        aligned = next((spec for spec in mix.specs if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"), None)
        self.split = aligned and MambaBlockAlignedSplit(
            aligned.block_size, coordinator.hash_block_size, coordinator.scheduler_block_size, MAX_MODEL_LEN, mix.use_eagle
        )
        self.told = read_manager(self.manager)

    def hear(self, event: Event) -> None:
        """At every report the books are sound, and the report tells them."""
        if self.told is None:
            return
        found = read_manager(self.manager)
        told = fold(self.told, event)  # type: ignore[arg-type]
        if not self.retained:
            assert told.copies == found.copies
        assert replace(told, copies={}) == replace(found, copies={}), str(event)
        self.told = replace(found, copies=told.copies)

    # ------------------------------------------------------------------ requests
    @rule(
        data=st.data(),
        shared=st.sampled_from([0, 1, 5, 20, 30, 30]),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        salt=st.sampled_from([None, None, None, None, "s"]),
        num_encoder_tokens=st.integers(1, 5),
    )
    def add(self, data: st.DataObject, shared: int, tail: list[int], salt: str | None, num_encoder_tokens: int) -> None:
        """Most go on with what an earlier one had."""
        earlier = [*self.waiting.values(), *self.running.values(), *self.over.values()]
        known = data.draw(st.sampled_from(earlier)).all_token_ids if earlier else [0] * 18
        request_id = f"r{len(self.outputs)}"
        self.outputs[request_id] = num_encoder_tokens if self.has_encoder else 0
        request = Request(request_id, [*known[: min(shared, 28)], *tail], SamplingParams(max_tokens=9), cache_salt=salt, block_hasher=self.hasher)
        self.waiting[request_id] = request
        self.learn(request)

    def learn(self, request: Request) -> None:
        if self.hasher is not None:
            self.model.learn(request, self.hasher.hash_block_size)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        num_tokens=st.sampled_from([64, 64, 64, 1, 3, 8, 12]),
        num_lookahead_tokens=st.sampled_from([0, 0, 0, 2]),
        full_sequence_must_fit=st.booleans(),
        has_scheduled_reqs=st.booleans(),
        release=st.booleans(),
        say=st.integers(0, 1),
    )
    def start(self, data: st.DataObject, num_tokens: int, release: bool, say: int, **options: Any) -> None:
        self._start(self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))], num_tokens, release, say, **options)

    def _start(self, request: Request, num_tokens: int, release: bool, say: int, **options: Any) -> None:
        self.manager.new_step_starts()
        before = read_manager(self.manager)
        hit = self.manager.get_computed_blocks(request)
        assert read_manager(self.manager) == before  # lookups are pure (R5.1)
        assert hit.num_tokens < request.num_tokens
        if hit.num_tokens:
            assert self.manager.enable_caching
            self.model.check_hit(request, hit.blocks.blocks, hit.num_tokens)
        request.shared_prefix_boundary = hit.junction
        num_new = self.cut(request, min(num_tokens, request.num_tokens - hit.num_tokens), hit.num_tokens)
        if not num_new:
            return
        new = self.manager.allocate_slots(
            request, num_new, hit.num_tokens, hit.blocks, num_encoder_tokens=self.outputs[request.request_id], reserved_blocks=0, **options
        )
        if new is None:
            assert read_manager(self.manager) == before
            return
        request.num_computed_tokens, request.status = hit.num_tokens, RequestStatus.RUNNING
        self.running[request.request_id] = self.waiting.pop(request.request_id)
        self.model.set_row(request.request_id, self.manager.get_block_ids(request.request_id))
        self.step(request, num_new, release, say)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        num_tokens=st.sampled_from([64, 64, 64, 1, 3, 8]),
        num_lookahead_tokens=st.sampled_from([0, 0, 0, 2]),
        delay_cache_blocks=st.sampled_from([False, False, False, True]),
        release=st.booleans(),
        say=st.integers(0, 1),
    )
    def run(self, data: st.DataObject, num_tokens: int, release: bool, say: int, **options: Any) -> None:
        self._run(self.running[data.draw(st.sampled_from(sorted(self.running)))], num_tokens, release, say, **options)

    def _run(self, request: Request, num_tokens: int, release: bool, say: int, **options: Any) -> None:
        self.manager.new_step_starts()
        num_new = self.cut(request, min(num_tokens, request.num_tokens - request.num_computed_tokens), request.num_computed_tokens)
        if not num_new or request.num_computed_tokens + num_new >= MAX_MODEL_LEN:
            return
        before = read_manager(self.manager)
        new = self.manager.allocate_slots(request, num_new, **options)
        if new is None:
            self.only_released(before, request.request_id)
            return
        if not new.is_empty():
            self.model.extend_row(request.request_id, new.get_block_ids())
        self.step(request, num_new, release, say)

    def only_released(self, before: PlainState, request_id: str) -> None:
        """A refusal changes nothing but what lies outside a window (R5.3 c)."""
        after = read_manager(self.manager)
        assert after.cache == before.cache
        assert after.frontiers == before.frontiers
        for (owner, group_id), table in before.tables.items():
            now = after.tables[owner, group_id]
            assert now == table or (owner == request_id and all(new in (old, 0) for old, new in zip(table, now, strict=True)))

    def cut(self, request: Request, num_new: int, num_computed: int) -> int:
        return self.split(request, num_new, num_computed)[0] if self.split else num_new

    def step(self, request: Request, num_new: int, release: bool, say: int) -> None:
        """The model runs, the copies' blocks are let go now or later, and a complete prefill brings a token."""
        copies, retained = self.manager.take_kv_cache_block_copies()
        start = request.num_computed_tokens
        work = Work(request.request_id, request.cache_salt, request.all_token_ids, request.num_prompt_tokens, start, start + num_new)
        self.retained += retained
        if release:
            self.let_go()
        self.model.run([work], copies)
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(say)
            self.learn(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_steps=st.integers(1, 9), end=st.booleans())
    def live(self, data: st.DataObject, num_steps: int, end: bool) -> None:
        """A usual life: admitted, computed at one go, a few tokens, perhaps the end."""
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self._start(self.waiting[request_id], 64, True, 0)
        for number in range(num_steps):
            if request_id in self.running:
                self._run(self.running[request_id], 64, True, number % 2)
        if end and request_id in self.running:
            self._end(request_id, True)

    @precondition(lambda self: self.retained)
    @rule()
    def let_go(self) -> None:
        retained, self.retained = self.retained, []
        self.manager.release_copied_blocks(retained)

    # ------------------------------------------------------------------ what else happens
    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.manager.cache_blocks(request, request.num_computed_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens, request.num_prompt_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), for_good=st.booleans())
    def end(self, data: st.DataObject, for_good: bool) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.running))), for_good)

    def _end(self, request_id: str, for_good: bool) -> None:
        request = self.running.pop(request_id)
        request.status = RequestStatus.FINISHED_STOPPED if for_good else RequestStatus.PREEMPTED
        (self.over if for_good else self.waiting)[request.request_id] = request
        self.manager.free(request)
        request.num_computed_tokens = 0
        del self.model.rows[request.request_id]
        assert not any(request.request_id in group.req_to_blocks for group in self.manager.coordinator.single_type_managers)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def touch_what_is_over(self, data: st.DataObject) -> None:
        request = self.over[data.draw(st.sampled_from(sorted(self.over)))]
        before = read_manager(self.manager)
        with pytest.raises(InvalidInput, match="is over"):
            self.manager.allocate_slots(request, 1)
        with pytest.raises(InvalidInput, match="is over"):
            self.manager.cache_blocks(request, 1)
        with pytest.raises(EngineError, match="freed twice"):
            self.manager.free(request)
        with pytest.raises(EngineError, match="has no blocks"):
            self.manager.remove_skipped_blocks(request.request_id, 1, 1)
        assert read_manager(self.manager) == before

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        cached = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        self.manager.evict_blocks(data.draw(st.sets(st.sampled_from(cached or [1]), max_size=2)))

    @rule()
    def reset(self) -> None:
        unused = self.pool.get_num_free_blocks() == self.num_unused
        assert self.manager.reset_prefix_cache() is unused

    # ------------------------------------------------------------------ what holds
    @invariant()
    def everything_holds(self) -> None:
        check_books(self.manager, [block.block_id for block in self.retained])
        self.model.check_cache(self.manager)
        if not self.running and not self.retained:
            assert self.pool.get_num_free_blocks() == self.num_unused


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(stateful_step_count=30)
