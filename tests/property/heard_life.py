"""A scheduler with every mix of groups, living through a few requests while somebody listens to its events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import reject
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.trace.events import Event
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import mixes


def make_scheduler(draw: st.DrawFn, listen: Callable[[Event], None]) -> DrivenScheduler:
    """Any mix, both policies, both ways of scheduling; combinations that the engine refuses are drawn again."""
    enable_caching = draw(st.sampled_from([True, True, True, False]))
    mix = draw(mixes(enable_caching))
    try:
        return DrivenScheduler(
            mix,
            1 + mix.num_for_one_token + draw(st.integers(0, 16)),
            enable_caching=enable_caching,
            listen=listen,
            async_scheduling=draw(st.booleans()),
            max_num_seqs=draw(st.integers(1, 4)),
            max_num_batched_tokens=draw(st.sampled_from([3, 4, 8, 9, 64])),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
        )
    except InvalidInput:
        reject()


def live(draw: st.DrawFn, driven: DrivenScheduler) -> None:
    """A few requests, some of which are aborted, evicted, reset and preempted on the way, to the end."""
    for _ in range(draw(st.integers(2, 5))):
        prompt = [*([0] * draw(st.integers(0, 16))), *draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))]
        request = driven.make(prompt, draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)), priority=draw(st.integers(0, 2)))
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
