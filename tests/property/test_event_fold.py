"""The events tell everything: for each of them, the state before and the event give the state after (random sessions, random schedulers, every scene)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.events import Event, kind_of
from scenarios import open_session
from scenarios.loader import library_files
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.fold import fold
from tests.property.group_mixes import mixes
from tests.property.plain_state import PlainState, read_manager, read_scheduler
from tests.property.test_random_sessions import scenarios


class Follower:
    """Hears every event of a scheduler and compares what the events say with what the engine has. `kinds`: the kinds heard so far."""

    def __init__(self) -> None:
        self.state = PlainState()
        self.scheduler: Any = None
        self.requests: Any = None
        self.kinds: set[str] = set()

    def begin(self, scheduler: Any, requests: dict[str, Any]) -> None:
        self.scheduler, self.requests = scheduler, requests
        self.state = read_manager(scheduler.kv_cache_manager)

    def __call__(self, event: Event) -> None:
        if self.scheduler is None:
            return  # while the engine is built
        self.kinds.add(kind_of(event))
        told = fold(self.state, event)  # type: ignore[arg-type]
        found = read_scheduler(self.scheduler, self.requests.values(), self.state)
        for field in fields(PlainState):
            expected, is_there = getattr(told, field.name), getattr(found, field.name)
            assert expected == is_there, f"{event}: by the events {field.name} is {expected}, the engine has {is_there}"
        self.state = found


def follow_session(session: Session) -> Follower:
    """Run `session` to its end with a follower beside its recorder."""
    follower = Follower()
    recorder, record = session._recorder, session._recorder.emit

    def listen(event: Event) -> None:
        follower(event)
        record(event)

    recorder.emit = listen  # type: ignore[method-assign]
    follower.begin(session._scheduler, session._requests)
    session.run_to_end()
    assert session.error is None
    return follower


@pytest.mark.parametrize("scene", sorted(library_files()))
def test_every_scene(scene: str) -> None:
    follower = follow_session(open_session(scene))
    assert {"request_added", "request_admitted", "step_scheduled", "blocks_allocated", "request_finished", "blocks_freed"} <= follower.kinds


@given(scenarios())
def test_random_sessions(scenario: tuple[SessionConfig, tuple[RequestSpec, ...]]) -> None:
    config, requests = scenario
    follow_session(Session(config, requests, vocabulary=str))


@st.composite
def lives(draw: st.DrawFn) -> tuple[DrivenScheduler, Follower]:
    """A scheduler with a few requests, some of which are aborted, evicted, reset and preempted on the way, heard to the end."""
    enable_caching = draw(st.sampled_from([True, True, True, False]))
    mix = draw(mixes(enable_caching))
    follower = Follower()
    try:
        driven = DrivenScheduler(
            mix,
            1 + mix.num_for_one_token + draw(st.integers(0, 16)),
            enable_caching=enable_caching,
            listen=follower,
            async_scheduling=draw(st.booleans()),
            max_num_seqs=draw(st.integers(1, 4)),
            max_num_batched_tokens=draw(st.sampled_from([3, 4, 8, 9, 64])),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
        )
    except InvalidInput:
        reject()
    follower.begin(driven.scheduler, driven.requests)
    for _ in range(draw(st.integers(2, 5))):
        shared = draw(st.integers(0, 16))
        request = driven.make(
            [*([0] * shared), *draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))],
            draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)),
            priority=draw(st.integers(0, 2)),
        )
        driven.requests[request.request_id] = request  # heard of before it is added: the event names it
        try:
            driven.add(request)
        except InvalidInput:
            del driven.requests[request.request_id]
            continue
        for _ in range(draw(st.integers(0, 6))):
            if len(driven.in_flight) == driven.max_in_flight:
                driven.update()
            driven.schedule()
        what = draw(st.sampled_from(["", "", "", "abort", "reset", "evict"]))
        if what == "abort" and request.request_id in driven.scheduler.requests:
            driven.abort(request.request_id)
        elif what == "reset":
            driven.scheduler.reset_prefix_cache(draw(st.booleans()))
        elif what == "evict":
            driven.manager.evict_blocks(draw(st.sets(st.integers(1, len(driven.manager.block_pool.blocks) - 1), max_size=3)))
    driven.run_to_end()
    return driven, follower


@given(lives())
def test_random_schedulers(life: tuple[DrivenScheduler, Follower]) -> None:
    """Every mix of groups, both policies, both ways of scheduling."""
    driven, follower = life
    assert follower.state.free == [block.block_id for block in driven.manager.block_pool.free_block_queue.get_all_free_blocks()]
