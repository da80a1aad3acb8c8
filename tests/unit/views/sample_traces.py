"""Three small runs with several KV-cache groups, made by hand after what real vLLM 0.27.0 did (the recorded runs T8, T20 and T27): block ids, tables, hits,
order of the free queue and copies are those of the recordings; tokens have words instead of numbers."""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import Cause, CauseKind
from engine.trace.frame import Trace
from tests.unit.views.trace_maker import TraceMaker

FULL, WINDOW, MAMBA = 0, 1, 1
WINDOW_GROUPS: list[dict[str, Any]] = [{"kind": "full_attention", "block_size": 4}, {"kind": "sliding_window", "block_size": 4, "sliding_window": 8}]
STATE_GROUPS: list[dict[str, Any]] = [{"kind": "full_attention", "block_size": 8}, {"kind": "mamba", "block_size": 8, "mamba_cache_mode": "align"}]


def window_run() -> Trace:
    """Full attention beside a window of 8 tokens (T8): the window lets go of its first blocks, and a second request finds null, 6 and 7 there."""
    m = TraceMaker(24, WINDOW_GROUPS, 4, "Full attention beside a window")
    m.arrive("A", 16)
    m.begin_step()
    m.take("A", FULL, [1, 2, 3, 4], 16)
    m.take("A", WINDOW, [5, 6, 7, 8], 16)
    for group_id, first in ((FULL, 1), (WINDOW, 5)):
        for n in range(4):
            m.cache("A", group_id, first + n, 4 * n + 4)
    m.schedule("A", 16)
    m.end_schedule(A=16)
    m.compute("A", 16)
    m.sample("A")
    m.begin_step()
    m.skip("A", WINDOW, [1, 0], Cause(CauseKind.OUTSIDE_WINDOW, {"num_skipped_tokens": 9}))
    m.take("A", FULL, [9], 17)
    m.take("A", WINDOW, [10], 17)
    m.schedule("A", 1)
    m.end_schedule(A=1)
    m.compute("A", 1)
    m.sample("A")
    m.finish("A")
    m.arrive("B", 14)
    m.begin_step()
    behind = [e.BlockStop(3, Cause(CauseKind.NOT_USED, {"logical_index": 3}), 8)]
    found = [
        e.GroupLookup(FULL, 12, [1, 2, 3], Cause(CauseKind.LAST_TOKEN_RULE, {"logical_index": 3, "max_hit_tokens": 13})),
        e.GroupLookup(WINDOW, 12, [0, 6, 7], Cause(CauseKind.BLOCK_NOT_FULL, {"logical_index": 3, "num_filled": 2, "block_size": 4}), behind),
    ]
    m.emit(
        "schedule",
        e.PrefixLookup(
            cause=Cause(CauseKind.LAST_TOKEN_RULE, {"logical_index": 3, "max_hit_tokens": 13}), request_id="B", num_hit_tokens=12,
            hit_block_ids=[1, 2, 3, 6, 7], max_hit_tokens=13, groups=found,
        ),
    )  # fmt: skip
    _touch(m, "B", FULL, [1, 2, 3], 0, 12)
    _touch(m, "B", WINDOW, [6, 7], 1, 12)
    m.take("B", FULL, [10], 14)
    m.take("B", WINDOW, [9], 14)
    m.made["B"].computed = 12
    m.schedule("B", 2)
    m.end_schedule(B=2)
    m.compute("B", 2)
    m.sample("B")
    return m.trace()


def _touch(m: TraceMaker, request_id: str, group_id: int, block_ids: list[int], num_null: int, num_tokens: int) -> None:
    left = [b for b in block_ids if b in m.queue]
    m.queue = [b for b in m.queue if b not in left]
    m.made[request_id].tables[group_id] = [0] * num_null + block_ids
    m.made[request_id].cached[group_id] = num_null + len(block_ids)
    cause = Cause(CauseKind.PREFIX_CACHE_HIT, {"num_hit_tokens": num_tokens, "num_from_queue": len(left)})
    event = e.BlocksTouched(
        cause=cause, request_id=request_id, group_id=group_id, block_ids=block_ids, left_free_queue=left, num_null_blocks=num_null,
        num_cached_block=num_null + len(block_ids),
    )  # fmt: skip
    m.emit("schedule", event)


def state_run() -> Trace:
    """Recurrent states alone, in blocks of 4 tokens (T27): only the newest state is kept, the places before it stay null."""
    m = TraceMaker(16, [{"kind": "mamba", "block_size": 4, "mamba_cache_mode": "align"}], 4, "Recurrent states alone")
    m.arrive("A", 10)
    m.begin_step()
    m.made["A"].tables[0].append(0)
    one = Cause(CauseKind.ONE_STATE, {"num_speculative_blocks": 0})
    m.emit("schedule", e.StateBlocksArranged(cause=one, request_id="A", group_id=0, num_blocks=1))
    m.take("A", 0, [1], 8)
    m.cache("A", 0, 1, 8)
    m.schedule("A", 8)
    m.end_schedule(A=8)
    m.compute("A", 8)
    m.begin_step()
    m.take("A", 0, [2], 10)
    m.schedule("A", 2)
    m.end_schedule(A=2)
    m.compute("A", 2)
    m.sample("A")
    m.begin_step()
    m.skip("A", 0, [1], Cause(CauseKind.STATE_SUPERSEDED, {"logical_index": 1}))
    m.schedule("A", 1)
    m.end_schedule(A=1)
    m.compute("A", 1)
    m.sample("A")
    return m.trace()


def copy_run() -> Trace:
    """Full attention beside recurrent states (T20): hashes inside blocks, a copy for the cache (4 → 5), then two for the second request (3 → 6, 5 → 7)."""
    m = TraceMaker(24, STATE_GROUPS, 4, "Copy on write beside recurrent states")
    boundary = CauseKind.PROMPT_BOUNDARY
    m.arrive("A", 14)
    for num_tokens, attention, state in ((8, 1, 2), (4, 3, 4)):
        m.begin_step()
        m.take("A", FULL, [attention], m.made["A"].computed + num_tokens)
        m.take("A", MAMBA, [state], m.made["A"].computed + num_tokens)
        kind = CauseKind.BLOCK_FULL if num_tokens == 8 else boundary
        m.cache("A", FULL, attention, m.made["A"].computed + num_tokens, kind)
        m.cache("A", MAMBA, state, m.made["A"].computed + num_tokens, kind)
        m.schedule("A", num_tokens)
        m.end_schedule(A=num_tokens)
        m.compute("A", num_tokens)
    m.begin_step()
    m.skip("A", MAMBA, [0], Cause(CauseKind.STATE_SUPERSEDED, {"logical_index": 0}))
    _copy_for_the_cache(m, "A", 4, 5)
    m.schedule("A", 2)
    _let_go(m, [4, 5])
    m.end_schedule(A=2)
    _copied(m, [4], [5])
    m.compute("A", 2)
    m.sample("A")
    m.arrive("B", 15)
    m.begin_step()
    found = [
        e.GroupLookup(FULL, 12, [1, 3], Cause(CauseKind.LAST_TOKEN_RULE, {"logical_index": 1, "max_hit_tokens": 14})),
        e.GroupLookup(MAMBA, 12, [0, 5], Cause(CauseKind.SHORTENED_BY_GROUP, {"by_group": FULL, "num_hit_tokens": 12})),
    ]
    m.emit(
        "schedule",
        e.PrefixLookup(cause=found[0].cause, request_id="B", num_hit_tokens=12, hit_block_ids=[1, 3, 5], max_hit_tokens=14, groups=found),
    )
    _touch(m, "B", FULL, [1, 3], 0, 12)
    _touch(m, "B", MAMBA, [5], 1, 12)
    _copy_for_the_request(m, "B", FULL, 3, 6)
    _copy_for_the_request(m, "B", MAMBA, 5, 7)
    m.made["B"].computed = 12
    m.schedule("B", 3)
    _let_go(m, [3, 6, 5, 7])
    m.end_schedule(B=3)
    _copied(m, [3, 5], [6, 7])
    m.compute("B", 3)
    m.sample("B")
    return m.trace()


def _pop(m: TraceMaker, block_id: int, group_id: int) -> None:
    assert m.queue[0] == block_id
    m._leave_queue([block_id], group_id)


def _copy_for_the_cache(m: TraceMaker, request_id: str, source: int, destination: int) -> None:
    """R6.5: the request keeps the source, all keys move to the copy; both are held for the step."""
    _pop(m, destination, MAMBA)
    m.block_keys[destination] = m.block_keys.pop(source)
    for key, _ in m.block_keys[destination]:
        m.keys[key] = [destination if b == source else b for b in m.keys[key]]
    m.pins[source], m.pins[destination] = ["copy"], ["copy"]
    cause = Cause(CauseKind.OWN_BOUNDARY, {"logical_index": 1, "num_tokens": 12})
    where = {"request_id": request_id, "group_id": MAMBA, "logical_index": 1}
    m.emit("schedule", e.CopyQueued(cause=cause, source_block_id=source, destination_block_id=destination, **where))


def _copy_for_the_request(m: TraceMaker, request_id: str, group_id: int, source: int, destination: int) -> None:
    """R6.4: the copy takes the shared block's place in the table; both are held for the step."""
    _pop(m, destination, group_id)
    m.made[request_id].tables[group_id][1] = destination
    m.made[request_id].cached[group_id] = 1
    m.pins[source], m.pins[destination] = ["copy"], ["copy"]
    cause = Cause(CauseKind.PARTIAL_HIT, {"logical_index": 1, "num_hit_tokens": 12})
    where = {"request_id": request_id, "group_id": group_id, "logical_index": 1}
    m.emit("schedule", e.CopyQueued(cause=cause, source_block_id=source, destination_block_id=destination, **where))


def _let_go(m: TraceMaker, block_ids: list[int]) -> None:
    for block_id in block_ids:
        m.pins.pop(block_id)
    m.free("schedule", Cause(CauseKind.COPY_QUEUED), block_ids)


def _copied(m: TraceMaker, sources: list[int], destinations: list[int]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        m.content[destination] = m.content[source]
        if source in m.states:
            m.states[destination] = m.states[source]
    m.emit("execute_model", e.BlocksCopied(cause=Cause(CauseKind.PARTIAL_HIT), source_block_ids=sources, destination_block_ids=destinations))
