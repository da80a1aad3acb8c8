"""The events tell everything: for each of them, the state before and the event give the state after (random sessions, random schedulers, every scene)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.events import Event, kind_of
from scenarios import load_scenario, open_session
from scenarios.loader import library_files
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.fold import fold
from tests.property.heard_life import live, make_scheduler
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


V1_SCENES = [scene for scene in sorted(library_files()) if load_scenario(scene).engine == "v1"]


@pytest.mark.parametrize("scene", V1_SCENES)
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
    follower = Follower()
    driven = make_scheduler(draw, follower)
    follower.begin(driven.scheduler, driven.requests)
    live(draw, driven)
    return driven, follower


@given(lives())
def test_random_schedulers(life: tuple[DrivenScheduler, Follower]) -> None:
    """Every mix of groups, both policies, both ways of scheduling."""
    driven, follower = life
    assert follower.state.free == [block.block_id for block in driven.manager.block_pool.free_block_queue.get_all_free_blocks()]
