"""Selectors and facts, on a trace made by hand, so that nothing here depends on what the engine decides."""

from __future__ import annotations

from typing import Any

import pytest

from engine.trace.events import (
    BlocksAllocated,
    Cause,
    CauseKind,
    Event,
    KVWritten,
    PrefixLookup,
    SlotsMapped,
    TokenSampled,
    TraceStarted,
)
from engine.trace.frame import BlockOwner, BlockState, Counters, Frame, RequestState, Trace, TraceHeader, WorkerRow
from scenarios import Scenario, parse_scenario, resolve_notes, scenario_from_data
from scenarios.expectations import check_expectations, select, selector_text
from scenarios.schema import Selector
from tests.scenarios.conftest import WordTokenizer

CAUSE = Cause(CauseKind.SCENARIO)
VOCABULARY = {1: "Four", 2: "score", 3: "and", 4: "seven", 5: "years"}


def block(block_id: int, tokens: tuple[int | None, ...] = (None, None), owner: str | None = None, hashed: bool = False) -> BlockState:
    owners = (BlockOwner(owner, 0, 0),) if owner else ()
    filled = sum(t is not None for t in tokens)
    return BlockState(block_id, len(owners), block_id == 0, ("ab:0",) if hashed else (), 2 if hashed else None, filled, tokens, owners)


def frame(seq: int, step: int, event: Event, blocks: list[BlockState], tokens: dict[str, tuple[int, ...]], tables: dict[str, tuple[int, ...]]) -> Frame:
    requests = tuple(
        RequestState(r, "RUNNING", 3, t, 3, (tables.get(r, ()),), ("ab",) if t else (), (None,), parent_id="B", cpu_block_ids=(1,)) for r, t in tokens.items()
    )
    free = tuple(b.block_id for b in blocks if not b.ref_cnt and not b.is_null)
    hash_map = tuple((b.block_hashes[0], (b.block_id,)) for b in blocks if b.block_hashes)
    return Frame(
        seq,
        step,
        "op",
        seq,
        event,
        tuple(blocks),
        free,
        hash_map,
        requests,
        tuple(tokens),
        ("W",),
        tuple(WorkerRow(row, r, (table,), ((2,),)) for row, (r, table) in enumerate(tables.items())),
        (6, 7, 2),
        {},
        Counters(),  # type: ignore[arg-type]
        (block(0), block(1, (1, None), "A")),
        (0,),
        ("W",),
    )


def made_by_hand() -> Trace:
    fresh = [block(0), block(1), block(2), block(3)]
    held = [block(0), block(1, (3, None), "A"), block(2), block(3, (1, 2), "A", hashed=True)]
    a, table = {"A": (1, 2, 3)}, {"A": (3, 1)}
    frames = [
        frame(0, 0, TraceStarted(cause=CAUSE, num_blocks=4, block_size=2), fresh, {}, {}),
        frame(1, 1, PrefixLookup(cause=Cause(CauseKind.NOT_CACHED), request_id="A", num_hit_tokens=0, hit_block_ids=[], max_hit_tokens=2), fresh, a, {}),
        frame(2, 1, BlocksAllocated(cause=CAUSE, request_id="A", block_ids=[3, 1]), held, a, table),
        frame(3, 1, SlotsMapped(cause=CAUSE, request_id="A", positions=[0, 1, 2], slots=[6, 7, 2], token_ids=[1, 2, 3]), held, a, table),
        frame(4, 1, KVWritten(cause=CAUSE, request_id="A", slots=[6, 7, 2], token_ids=[1, 2, 3], num_layers=1, backend="torch"), held, a, table),
        frame(5, 1, TokenSampled(cause=CAUSE, request_id="A", token_id=4, position=3, num_block_hashes=1), held, {"A": (1, 2, 3, 4)}, table),
        frame(6, 2, KVWritten(cause=CAUSE, request_id="A", slots=[3], token_ids=[4], num_layers=1, backend="torch"), held, {"A": (1, 2, 3, 4)}, table),
        frame(7, 2, KVWritten(cause=CAUSE, request_id="B", slots=[4], token_ids=[5], num_layers=1, backend="torch"), held, {"A": (1, 2, 3, 4), "B": ()}, table),
    ]
    groups = {"kv_cache_groups": [{"kind": "full_attention", "block_size": 2, "page_size_bytes": 16}], "hash_block_size": 2}
    return Trace(TraceHeader({}, groups, {"name": "none"}, {}, {}, 0, VOCABULARY), frames, complete=True)


def scenario(**parts: Any) -> Scenario:
    requests = [{"id": r, "prompt_token_ids": [1, 2, 3], "force": [4]} for r in ("A", "B")]
    base = {"id": "s", "title": "t", "source": "s", "goal": "g", "model": "none", "config": {"num_blocks": 4, "block_size": 2}, "requests": requests}
    return scenario_from_data({**base, **parts})


@pytest.mark.parametrize(
    ("selector", "seq"),
    [
        (Selector(kind="start"), 0),
        (Selector(kind="end"), 7),
        (Selector(kind="kv_written"), 4),
        (Selector(kind="kv_written", nth=2), 6),
        (Selector(kind="kv_written", nth=3), 7),
        (Selector(kind="kv_written", nth=-1), 7),
        (Selector(kind="kv_written", nth=-3), 4),
        (Selector(kind="kv_written", request="A", nth=-1), 6),
        (Selector(kind="kv_written", request="B"), 7),
        (Selector(kind="kv_written", step=2), 6),
        (Selector(kind="kv_written", step=2, request="B"), 7),
        (Selector(kind="kv_written", nth=4), None),
        (Selector(kind="kv_written", nth=-4), None),
        (Selector(kind="kv_written", request="B", nth=2), None),
        (Selector(kind="block_evicted"), None),
    ],
    ids=str,
)
def test_selectors_name_events(selector: Selector, seq: int | None) -> None:
    found = select(selector, made_by_hand().frames)
    assert (found.seq if found else None) == seq


def test_selectors_find_nothing_where_there_is_nothing() -> None:
    assert select(Selector(kind="start"), []) is None


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (Selector(kind="start"), "the start"),
        (Selector(kind="kv_written"), "1st kv_written"),
        (Selector(kind="kv_written", nth=2, request="A", step=3), "2nd kv_written of A in step 3"),
        (Selector(kind="kv_written", nth=11), "11th kv_written"),
        (Selector(kind="kv_written", nth=23), "23rd kv_written"),
        (Selector(kind="kv_written", nth=-1), "last kv_written"),
        (Selector(kind="kv_written", nth=-2), "2nd last kv_written"),
    ],
    ids=str,
)
def test_selectors_in_words(selector: Selector, text: str) -> None:
    assert selector_text(selector) == text


ALLOCATED = {"kind": "blocks_allocated"}
MAPPED = {"kind": "slots_mapped"}
SAMPLED = {"kind": "token_sampled"}
LOOKUP = {"kind": "prefix_lookup"}
FACTS: list[tuple[Any, str, Any, Any]] = [
    # selector, fact, what the hand-made trace says, something else
    ("start", "free_queue", [1, 2, 3], [3, 1, 2]),
    (ALLOCATED, "free_queue", [2], []),
    ("start", "free_queue_starts_with", [1, 2], [2]),
    ("start", "free_queue_starts_with", [], [1, 2, 3, 0]),
    ("start", "num_free", 3, 2),
    (ALLOCATED, "block_table", {"A": [3, 1]}, {"A": [1, 3]}),
    (ALLOCATED, "num_filled", {3: 2, 1: 1, 2: 0}, {3: 2, 1: 2}),
    (ALLOCATED, "block_tokens", {3: ["Four", "score"], 1: ["and", None]}, {3: ["score", "Four"]}),
    (ALLOCATED, "block_tokens", {1: ["and", None]}, {1: ["and"]}),
    (ALLOCATED, "ref_cnt", {3: 1, 1: 1, 2: 0}, {3: 2}),
    (ALLOCATED, "hashed", [3], []),
    (ALLOCATED, "hash_map_size", 1, 0),
    (ALLOCATED, "hash_names", {3: ["A@2"], 1: []}, {3: ["B@2"]}),
    (ALLOCATED, "num_state_tokens", {3: None}, {3: 2}),
    (ALLOCATED, "num_cached_block", {"A": [None]}, {"A": [1]}),
    ("start", "page_size_bytes", [16], [8]),
    (ALLOCATED, "status", {"A": "RUNNING"}, {"A": "WAITING"}),
    (ALLOCATED, "num_computed_tokens", {"A": 3}, {"A": 0}),
    (SAMPLED, "tokens", {"A": ["seven"]}, {"A": ["seven", "years"]}),
    (SAMPLED, "tokens", {"A": [" seven"]}, {"A": []}),
    (ALLOCATED, "tokens", {"A": []}, {"A": ["seven"]}),
    (SAMPLED, "output_text", {"A": "seven"}, {"A": "years"}),
    (MAPPED, "slot", {0: 6, 2: 2}, {0: 0}),
    (SAMPLED, "slot", {0: 6, 1: 7, 2: 2, 3: 3}, {4: 4}),
    (MAPPED, "slot_mapping", [6, 7, 2], [6, 7]),
    (MAPPED, "worker_row", {"A": [3, 1]}, {"A": [3]}),
    (MAPPED, "stale_tail", {"A": [2]}, {"A": []}),
    (ALLOCATED, "running", ["A"], []),
    (ALLOCATED, "waiting", ["W"], []),
    ("end", "count", {"kv_written": 3, "block_evicted": 0}, {"kv_written": 2}),
    ({"kind": "kv_written", "nth": 2}, "count", {"kv_written": 2}, {"kv_written": 3}),
    (ALLOCATED, "block_ids", [3, 1], [1, 3]),
    (MAPPED, "slots", [6, 7, 2], []),
    (LOOKUP, "num_hit_tokens", 0, 2),
    (LOOKUP, "cause", "not_cached", "block_not_full"),
    (LOOKUP, "event", {"max_hit_tokens": 2, "hit_block_ids": []}, {"max_hit_tokens": 3}),
    # the paper's engine
    (ALLOCATED, "cpu_block_table", {"A": [1]}, {"A": [0]}),
    (ALLOCATED, "cpu_ref_cnt", {0: 0, 1: 1}, {1: 2}),
    (ALLOCATED, "cpu_block_tokens", {1: ["Four", None], 0: [None, None]}, {1: ["score", None]}),
    (ALLOCATED, "cpu_free_queue", [0], [0, 1]),
    (ALLOCATED, "swapped", ["W"], []),
    (ALLOCATED, "parents", {"A": "B"}, {"A": None}),
]
PAPER_FACTS = {f[1] for f in FACTS[-6:]}


def _check(at: Any, fact: str, value: Any) -> list[str]:
    trace = made_by_hand()
    made = scenario()
    expectation = {"at": at, fact: value}
    if fact in ("running", "waiting", "swapped"):
        made = scenario(requests=[{"id": r, "prompt_token_ids": [1], "force": [4]} for r in ("A", "W")])
    if fact in PAPER_FACTS:
        made = scenario(engine="paper", config={"num_blocks": 4, "block_size": 2, "num_cpu_blocks": 2}, requests=made.plain()["requests"])
    data = {**made.plain(), "expect": [expectation]}
    return [str(f) for f in check_expectations(scenario_from_data(data), trace, WordTokenizer().decode)]


@pytest.mark.parametrize(("at", "fact", "right", "wrong"), FACTS, ids=[f"{f[1]}-{n}" for n, f in enumerate(FACTS)])
def test_facts_hold_or_fail(at: Any, fact: str, right: Any, wrong: Any) -> None:
    assert _check(at, fact, right) == []
    failures = _check(at, fact, wrong)
    assert len(failures) == 1
    assert failures[0].startswith(f"the scenario: expect[0].{fact}: ")
    assert f"expected {fact} " in failures[0]


def test_every_fact_of_the_schema_is_tested_here() -> None:
    from scenarios.schema import Expectation

    assert {f[1] for f in FACTS} == set(Expectation.model_fields) - {"at"}


def test_a_failure_says_which_expected_and_got() -> None:
    assert _check(ALLOCATED, "block_table", {"A": [2, 1]}) == [
        "the scenario: expect[0].block_table: 1st blocks_allocated (frame 2): expected block_table {'A': [2, 1]}, got {'A': [3, 1]}"
    ]


def test_failures_come_in_the_order_of_the_file() -> None:
    text = """\
id: s
title: t
source: s
goal: g
model: none
config: {num_blocks: 4, block_size: 2}
requests: [{id: A, prompt_token_ids: [1, 2, 3], force: [4]}]
expect:
  - at: end
    hashed: []
    free_queue: []
  - at: {kind: block_evicted}
    num_free: 0
"""
    made = parse_scenario(text, "s.yaml")
    failures = check_expectations(made, made_by_hand(), WordTokenizer().decode)
    assert [f.place for f in failures] == ["s.yaml:10: expect[0].hashed", "s.yaml:11: expect[0].free_queue", "s.yaml:12: expect[1].at"]


def test_an_event_that_never_happens_fails_the_expectation() -> None:
    assert _check({"kind": "kv_written", "request": "A", "nth": 3}, "num_free", 1) == [
        "the scenario: expect[0].at: 3rd kv_written of A: no such event; the run has 2 of them"
    ]


def test_facts_about_a_request_that_has_not_arrived_fail() -> None:
    assert _check(ALLOCATED, "status", {"B": "RUNNING"})[0].endswith("expected status {'B': 'RUNNING'}, got {'B': None}")
    assert _check(ALLOCATED, "tokens", {"B": []})[0].endswith("got {'B': None}")
    assert _check(ALLOCATED, "output_text", {"B": ""})[0].endswith("got {'B': None}")
    assert _check("start", "slot", {0: 6})[0].endswith("got {0: None}")


def test_notes_are_placed_by_event_and_joined() -> None:
    notes = [
        {"at": "start", "say": "It begins."},
        {"at": {"kind": "kv_written", "nth": 2}, "say": "Second."},
        {"at": {"kind": "kv_written", "step": 2}, "say": "The same."},
        {"at": "block_evicted", "say": "Never."},
    ]
    made = scenario(notes=notes)
    frames = made_by_hand().frames
    assert resolve_notes(made, frames) == {0: "It begins.", 6: "Second. The same."}
    assert resolve_notes(made, frames[:5]) == {0: "It begins."}
    assert resolve_notes(made, []) == {}
