"""What a scenario can expect of the worker's rows (R8.2, R8.3), and the scenes about them: whatever a row still says, no kernel program reads it (A20, A21)."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from engine.trace.events import AttentionComputed
from engine.trace.frame import Frame, Trace, WorkerRow
from scenarios import load_scenario, open_session, parse_scenario
from scenarios.expectations import check_expectations
from tests.scenarios.refusals import assert_complains, replaced
from views.narration.words import Words
from views.narration.worker_rows import GIVEN_UP, TAIL, row_notes

GOOD = """\
id: scene
title: A title
source: somewhere
goal: See something.
model: none
opens: worker_rows
config: {num_blocks: 11, block_size: 4, clear_rows: false}
requests:
  - {id: A, prompt_length: 23, force: [100, 101]}
  - {id: B, prompt_length: 10, force: [102, 103, 104, 105]}
expect:
  - at: {kind: row_updated, request: B, nth: 2}
    worker_row: {B: [7, 8, 9]}
    stale_tail: {B: [4, 5, 6]}
  - at: {kind: row_updated, request: A, nth: 1}
    worker_row: {A: [1, 2, 3, 4, 5, 6]}
    stale_tail: {A: []}
"""

edited = partial(replaced, GOOD)


def read_by_kernels(frame: Frame) -> dict[tuple[str, int], set[int]]:
    """Request and group -> the blocks that the programs of its attention were seen to read in this event."""
    assert isinstance(frame.event, AttentionComputed)
    read: dict[tuple[str, int], set[int]] = {}
    for launch in frame.event.witness or ():
        for program in launch.programs:
            if launch.kernel == "paged_attention" and program.request_id is not None:
                read.setdefault((program.request_id, launch.group_id), set()).update(program.block_ids_read)
    return read


def launches(trace: Trace) -> list[Frame]:
    return [frame for frame in trace.frames if isinstance(frame.event, AttentionComputed)]


def differing(trace: Trace, frame: Frame, kind: str) -> list[tuple[str, int, set[int]]]:
    """Request, group and the blocks that its row names in the columns of one kind of difference."""
    found = []
    for note in row_notes(Words(trace.header, frame, None)):
        row = next(row for row in frame.rows if row.request_id == note.request_id)
        said = [*row.block_ids[note.group_id], *(row.stale_block_ids[note.group_id] if row.stale_block_ids else ())]
        if note.kind == kind:
            found.append((note.request_id, note.group_id, {said[column] for column in range(note.first, note.last + 1)}))
    return found


def test_rows_and_tails_are_compared() -> None:
    scenario = parse_scenario(GOOD, "s.yaml")
    trace = open_session(scenario).run_to_end()
    assert check_expectations(scenario, trace, str) == []
    wrong = parse_scenario(
        edited("stale_tail: {B: [4, 5, 6]}", "stale_tail: {B: [4, 5]}").replace("worker_row: {B: [7, 8, 9]}", "worker_row: {B: [7, 8]}"), "s.yaml"
    )
    assert [(f.fact, f.expected, f.got) for f in check_expectations(wrong, trace, str)] == [
        ("worker_row", {"B": [7, 8]}, {"B": [7, 8, 9]}),
        ("stale_tail", {"B": [4, 5]}, {"B": [4, 5, 6]}),
    ]


def test_a_request_without_a_row_has_nothing_to_compare() -> None:
    early = edited("at: {kind: row_updated, request: A, nth: 1}", "at: {kind: step_scheduled, step: 1}")
    scenario = parse_scenario(early, "s.yaml")
    trace = open_session(scenario).run_to_end()
    assert [(f.fact, f.got) for f in check_expectations(scenario, trace, str)] == [("worker_row", {"A": None}), ("stale_tail", {"A": None})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited("worker_row: {B: [7, 8, 9]}", "worker_row: {B: [[7], [8]]}"),
         "s.yaml:13: expect[0].worker_row.B: there is 1 group; write the table as in [1, 2]"),
        (edited("stale_tail: {B: [4, 5, 6]}", "stale_tail: {X: [4]}"),
         "s.yaml:14: expect[0].stale_tail.X: there is no request “X”; did you mean “A”? The choices are A, B"),
        (edited("stale_tail: {B: [4, 5, 6]}", "stale_tail: {B: [4, 50]}"),
         "s.yaml:14: expect[0].stale_tail.B: there is no block 50; the pool has the blocks 0 to 10"),
        (edited("opens: worker_rows", "opens: everything"), "s.yaml:6: opens: "),
        (edited("opens: worker_rows\n", "engine: paper\n"),
         "s.yaml:7: config.clear_rows: “clear_rows” belongs to vLLM V1; leave it out, or set “engine” to v1"),
        (edited("model: none", "engine: paper\nmodel: none").replace(", clear_rows: false", ""),
         "s.yaml:7: opens: “opens” belongs to vLLM V1; leave it out, or set “engine” to v1"),
    ],
)  # fmt: skip
def test_what_cannot_be_expected_is_refused_with_its_place(text: str, message: str) -> None:
    assert_complains(text, message.partition("; did you mean")[0])


def test_a20_no_program_reads_what_the_windows_left_in_the_row() -> None:
    """A20: all six layers on the kernels. While A's row names block 2, B writes its words there, in the same layers; A's programs read what its table names."""
    trace = open_session(load_scenario("stale-row"), interpreted_layers="all").run_to_end()
    seen = 0
    for frame in launches(trace):
        read = read_by_kernels(frame)
        assert {group for _, group in read} == {0, 1, 2}
        for request_id, group_id, old in differing(trace, frame, GIVEN_UP):
            assert not read[request_id, group_id] & old
            seen += 1
        for (request_id, group_id), block_ids in read.items():
            request = frame.request(request_id)
            assert request is not None
            assert block_ids <= {b for b in request.block_ids[group_id] if b}
    assert seen == 8  # two windows in each of four decode steps
    while_b_runs = launches(trace)[2]
    assert [owner.request_id for owner in while_b_runs.blocks[2].owners] == ["B"]
    assert ("A", 0, {1, 2}) in differing(trace, while_b_runs, GIVEN_UP)


def test_a21_what_stands_behind_a_row_changes_nothing() -> None:
    """A21: with the tail and without it every frame is the same but for the tail itself, down to the logits' tokens and what the programs read."""
    scenario = load_scenario("stale-tail")
    cleared = scenario.model_copy(update={"config": scenario.config.model_copy(update={"clear_rows": True})})
    stale, clean = (open_session(s, interpreted_layers="all").run_to_end() for s in (scenario, cleared))
    tails = {(row.request_id, ids) for frame in stale.frames for row in frame.rows for ids in row.stale_block_ids}
    assert tails == {("B", (4, 5, 6)), ("B", (5, 6)), ("C", (9,))}
    assert [without_tails(frame) for frame in stale.frames] == clean.frames
    for frame in launches(stale):
        for request_id, group_id, old in differing(stale, frame, TAIL):
            assert not read_by_kernels(frame)[request_id, group_id] & old


def without_tails(frame: Frame) -> Frame:
    return msgspec.structs.replace(frame, rows=tuple(WorkerRow(row.row, row.request_id, row.block_ids) for row in frame.rows))
