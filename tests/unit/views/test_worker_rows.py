"""The worker's rows beside the manager's tables (rules R8.2 and R8.3, cases A20 and A21): which columns differ, and what is said of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core.output import SamplingParams
from engine.session import GroupConfig, RequestSpec, Session, SessionConfig
from engine.trace.events import AttentionComputed, Cause, CauseKind, StateWritten, StepStarted
from engine.trace.frame import Frame, Trace, WorkerRow
from engine.trace.witness import LaunchWitness, ProgramWitness
from tests.unit.views.sample_traces import state_run, window_run
from views.narration.words import Words
from views.narration.worker_rows import CHANGED, GIVEN_UP, LEFT, NOT_TOLD, TAIL, RowNote, first_query, reads_note, row_notes
from views.stage.payload import build_payload
from views.stage.worker_rows import RowsOnStage


def request(name: str, num_tokens: int, num_outputs: int, step: int = 1, first: int = 0) -> RequestSpec:
    forced = tuple(range(90, 90 + num_outputs))
    return RequestSpec(name, tuple(range(first, first + num_tokens)), SamplingParams(max_tokens=num_outputs, forced_token_ids=forced), step)


def ran(config: SessionConfig, *requests: RequestSpec) -> Trace:
    return Session(config, requests, model_name="none", vocabulary=str).run_to_end()


def case_a20() -> Trace:
    """A20: one group with a window of 8 tokens, blocks of 4, eight blocks. A's 16 tokens take 1 to 4; B comes when the window has moved on."""
    window = (GroupConfig("sliding_window", sliding_window=8),)
    config = SessionConfig(8, 4, kv_cache_groups=window, enable_prefix_caching=False)
    return ran(config, request("A", 16, 4), request("B", 8, 2, step=3, first=50))


def case_a21(clear_rows: bool = False) -> Trace:
    """A21: A has [1..6] in row 0, B [7,8,9] in row 1; A ends and B moves down. C then gets blocks that stand behind B's end."""
    config = SessionConfig(11, 4, clear_rows=clear_rows)
    return ran(config, request("A", 23, 2), request("B", 10, 6, first=50), request("C", 6, 3, step=4, first=70))


def frames_of(trace: Trace, kind: str) -> list[Frame]:
    return [frame for frame in trace.frames if frame.event.__struct_config__.tag == kind]


def notes_at(trace: Trace, frame: Frame, **more: Any) -> list[RowNote]:
    return row_notes(Words(trace.header, frame, None), **more)


def table(frame: Frame, name: str) -> list[int]:
    found = frame.request(name)
    assert found is not None
    return list(found.block_ids[0])


def row(frame: Frame, name: str) -> WorkerRow:
    return next(row for row in frame.rows if row.request_id == name)


def test_a20_the_manager_gives_places_up_and_the_row_keeps_them() -> None:
    """R8.3: table [0,0,3,4,5], row [1,2,3,4,5]. The token at position 16 sees 9 to 16, so the kernel begins in column 2."""
    trace = case_a20()
    frame = frames_of(trace, "kv_written")[1]
    assert (table(frame, "A"), row(frame, "A").block_ids) == ([0, 0, 3, 4, 5], ((1, 2, 3, 4, 5),))
    (note,) = notes_at(trace, frame)
    assert note[:5] == ("A", 0, 0, 1, GIVEN_UP)
    assert note.text == (
        "The manager gave places 0 and 1 up (null) and sends the worker nothing: the row still says 1 and 2 (R8.3). Blocks 1 and 2 are free. "
        "Harmless: the window of token 16 begins at position 9, so the kernel starts in column 2."
    )


def test_a20_it_is_said_who_has_the_blocks_now() -> None:
    """A20: B's 8 tokens take blocks 6 and 7, and its next block is 2, which A's window has left."""
    trace = case_a20()
    frame = next(f for f in trace.frames if f.request("B") is not None and 2 in table(f, "B") and f.op == "execute_model")
    assert table(frame, "B") == [6, 7, 2]
    (note,) = [n for n in notes_at(trace, frame) if n.request_id == "A"]
    assert "Block 1 is free; block 2 belongs to B now." in note.text


def test_a_new_block_is_not_in_the_row_until_the_step_is_executed() -> None:
    """R8.3: the scheduler sends appended ids with the step."""
    trace = case_a20()
    planned = next(f for f in frames_of(trace, "step_scheduled") if f.step == 2)
    notes = {note.kind: note for note in notes_at(trace, planned)}
    assert set(notes) == {GIVEN_UP, NOT_TOLD}
    assert notes[NOT_TOLD][2:4] == (4, 4)
    assert notes[NOT_TOLD].text == "New in the manager's table: block 5. The worker hears of it when the step is executed, and appends."


def test_a_row_outlives_its_request_until_the_next_step() -> None:
    trace = case_a21()
    freed = frames_of(trace, "blocks_freed")[0]
    notes = [note for note in notes_at(trace, freed) if note.kind == LEFT]
    assert [note[:4] for note in notes] == [("A", 0, 0, 5)]
    assert notes[0].text.startswith("A is finished and has no blocks any more.")


def test_a21_what_stands_behind_the_end_of_a_row_is_told_with_who_left_it() -> None:
    """R8.2: B's row is [7,8,9] and behind it stand A's last three blocks, which are free by then; later two of them are C's."""
    trace = case_a21()
    moved = next(f for f in frames_of(trace, "row_updated") if f.event.cause.facts.get("from_row") == 1)
    assert (row(moved, "B").block_ids, row(moved, "B").stale_block_ids) == (((7, 8, 9),), ((4, 5, 6),))
    (note,) = notes_at(trace, moved, occupants={0: ["A", "B"]})
    assert note[:5] == ("B", 0, 3, 5, TAIL)
    assert note.text.startswith("Behind its 3 entries the row still says 4 to 6, left by A when it sat in row 0")
    assert "Blocks 4 to 6 are free." in note.text
    (nameless,) = notes_at(trace, moved)
    assert "left by others, which sat there before" in nameless.text
    (several,) = notes_at(trace, moved, occupants={0: ["A", "X", "B"]})
    assert "left by A and X, which sat there before" in several.text
    taken = next(f for f in frames_of(trace, "blocks_allocated") if f.event.request_id == "C")
    assert table(taken, "C") == [6, 5]
    assert "Block 4 is free; blocks 5 and 6 belong to C now." in next(note.text for note in notes_at(trace, taken) if note.kind == TAIL)


def test_a21_with_cleared_rows_there_is_no_tail() -> None:
    """R8.2: clear_row zeroes the used part, so that the same run differs nowhere but where the worker has not heard yet."""
    trace = case_a21(clear_rows=True)
    kinds = {note.kind for frame in trace.frames for note in notes_at(trace, frame)}
    assert kinds == {NOT_TOLD, LEFT}
    assert all(not row.stale_block_ids for frame in trace.frames for row in frame.rows)


def test_a_window_that_still_reads_a_column_is_not_called_harmless() -> None:
    """The sentence is worked out from the window: were block 3 given up while token 16 still sees position 9, nothing would be excused."""
    trace = case_a20()
    frame = frames_of(trace, "kv_written")[1]
    early = msgspec.structs.replace(
        frame,
        requests=tuple(msgspec.structs.replace(r, block_ids=((0, 0, 0, 4, 5),)) if r.request_id == "A" else r for r in frame.requests),
    )
    (note,) = notes_at(trace, early)
    assert note[2:5] == (0, 2, GIVEN_UP)
    assert "Harmless" not in note.text


def test_another_block_in_the_table_is_a_difference_of_its_own() -> None:
    trace = case_a20()
    frame = frames_of(trace, "kv_written")[1]
    other = msgspec.structs.replace(
        frame,
        requests=tuple(msgspec.structs.replace(r, block_ids=((1, 2, 7, 4, 5),)) if r.request_id == "A" else r for r in frame.requests),
    )
    (note,) = notes_at(trace, other)
    assert note[2:5] == (2, 2, CHANGED)
    assert note.text == "The manager's table says 7 in place 2, the row 3."


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (GroupConfig("chunked_local", attention_chunk_size=8), "Harmless: the chunk of token 16 begins at position 16, so the kernel starts in column 4."),
        (GroupConfig("mamba", mamba_cache_mode="all"), "Harmless: a step reads one state, that in column 3."),
    ],
)
def test_other_groups_have_reasons_of_their_own(group: GroupConfig, text: str) -> None:
    """R3.1, R3.42: a chunk begins anew at a multiple of its size; a recurrence reads the state of the token before."""
    trace = ran(SessionConfig(16, 4, kv_cache_groups=(group,)), request("A", 16, 4))
    frame = next(f for f in trace.frames if f.step == 2 and f.op == "execute_model" and any(n.kind == GIVEN_UP for n in notes_at(trace, f)))
    assert next(n.text for n in notes_at(trace, frame) if n.kind == GIVEN_UP).endswith(text)


def test_the_first_token_of_a_step_is_known_before_and_after_the_counter_moves_on() -> None:
    """R7.1: the scheduler counts on when it has planned, before the kernels run."""
    trace = case_a20()
    queries = {(f.step, f.op): first_query(f, f.request("A")) for f in trace.frames if f.step == 2 and f.request("A") is not None}  # type: ignore[arg-type]
    assert queries == {(2, "schedule"): 16, (2, "execute_model"): 16, (2, "update_from_output"): 16, (2, "add_request B"): 17}


def test_what_the_kernel_says_is_held_against_what_differs() -> None:
    words = Words(window_run().header, window_run().frames[0], None)
    assert (
        reads_note(words, "A", [3, 4, 13], [0], [1, 2])
        == "In this step the kernel was seen to read blocks 3, 4 and 13 for A (layer 0): nothing of what differs."
    )
    assert reads_note(words, "A", [2, 3], [0, 3], [1, 2]).endswith("(layers 0 and 3), among them block 2, which it should not.")
    assert reads_note(words, "B", [6], [0], []) == "In this step the kernel was seen to read block 6 for B (layer 0)."


def attention(*programs: tuple[str, list[int]], layer: int = 0, group_id: int = 0) -> AttentionComputed:
    seen = [ProgramWitness(n, 0, name, [0], [0], block_ids_read=ids) for n, (name, ids) in enumerate(programs)]
    launch = LaunchWitness("paged_attention", [layer], len(seen), 1, 4, seen, group_id=group_id)
    cause = Cause(CauseKind.COMPARED_WITH_REFERENCE)
    return AttentionComputed(cause=cause, backend="torch", layers=[layer], agrees_within=None, query_lens=[], seq_lens=[], request_ids=[], witness=[launch])


def test_what_was_read_stays_until_the_step_ends() -> None:
    """All programs of a request and all watched layers of a group count together."""
    trace = window_run()
    frame = next(f for f in trace.frames if f.rows)
    rows = RowsOnStage(trace.header, [])

    def at(event: Any) -> list[list[Any]]:
        sent = rows.at(msgspec.structs.replace(frame, event=event), None)["row_reads"]
        return [rows.distinct[index][:3] for index in sent]

    assert at(attention(("A", [1, 2]), ("A", [2, 3]), ("B", [9]))) == [["A", 0, [1, 2, 3]], ["B", 0, [9]]]
    assert at(attention(("A", [3, 4]), layer=1)) == [["A", 0, [1, 2, 3, 4]], ["B", 0, [9]]]
    state = StateWritten(cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP), request_id="A", group_id=1, block_id=7, num_tokens=9, source_block_id=5, num_layers=3)
    assert at(state)[-1] == ["A", 1, [5]]
    assert at(StepStarted(cause=Cause(CauseKind.NEXT_STEP), token_budget=8)) == []


def test_the_browser_gets_each_note_once_and_portions_agree() -> None:
    trace = case_a21()
    whole = build_payload(trace)
    assert len({str(note) for note in whole["row_notes"]}) == len(whole["row_notes"])

    def tails(payload: dict[str, Any]) -> list[list[Any]]:
        notes: list[list[Any]] = []
        standing: list[int] = []
        for frame in payload["frames"]:
            standing = frame.get("row_notes", standing)
            notes.append([payload["row_notes"][index] for index in standing])
        return notes

    middle = len(trace.frames) // 2
    assert tails(build_payload(trace, start=middle)) == tails(whole)[middle:]
    assert any(note[4] == TAIL for notes in tails(whole) for note in notes)


def test_a_bookkeeping_run_claims_no_reads_and_the_papers_engine_has_no_notes() -> None:
    assert all(not frame.get("row_reads") for frame in build_payload(state_run())["frames"])
    trace = case_a20()
    paper = msgspec.structs.replace(trace.header, config={**trace.header.config, "engine": "paper"})
    assert RowsOnStage(paper, []).at(trace.frames[-1], None) == {"row_notes": [], "row_reads": []}
