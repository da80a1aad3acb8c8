"""A worker of the paper's engine without a model, on plans made by hand; and plans that nobody could run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.core.output import SamplingParams
from engine.errors import EngineError, InvalidInput, PagewalkError
from engine.iteration_check import check_plan
from engine.paper.config import PaperConfig
from engine.paper.step import IterationPlan, ScheduledSequence
from engine.paper_bookkeeping import PaperBookkeepingRunner
from engine.row_change import row_change
from engine.trace.events import BlocksCopied, CauseKind, Event, KVWritten, RowUpdated, SlotsMapped, kind_of

PROMPT = tuple(range(10, 17))
FATHERS, MOTHERS = 20, 30


def sequence(name: str, token_ids: tuple[int, ...], block_ids: tuple[int, ...], computed: int, forced: tuple[tuple[int, ...], ...] = ()) -> ScheduledSequence:
    """All that is known is computed. `forced`: one entry per draw; the names of the draws are A1, A2, …"""
    return ScheduledSequence(
        sequence_id=name,
        token_ids=token_ids,
        block_ids=block_ids,
        num_computed_tokens=computed,
        num_scheduled_tokens=len(token_ids) - computed,
        num_prompt_tokens=7,
        num_output_tokens=len(token_ids) - 7,
        draws=tuple(SamplingParams(forced_token_ids=tokens) for tokens in forced),
        draw_names=tuple(f"A{i + 1}" for i in range(len(forced))),
    )


def made() -> tuple[PaperBookkeepingRunner, list[Event]]:
    events: list[Event] = []
    return PaperBookkeepingRunner(PaperConfig(num_blocks=9, block_size=4), events.append), events


def test_figure_8_slots_copy_and_forced_tokens() -> None:
    """The paper's Figure 8: table 7, 1 for both samples; A1 writes “fathers” into block 3, a copy of 1; A2 writes “mothers” into 1 in place."""
    runner, events = made()
    outputs = runner.execute(IterationPlan((sequence("A1", PROMPT, (7, 1), 0, ((FATHERS, 21), (MOTHERS, 31))),)))
    assert [token.token_id for token in outputs["A1"].sampled] == [FATHERS, MOTHERS]
    assert {token.cause.kind for token in outputs["A1"].sampled} == {CauseKind.FORCED}
    assert outputs["A1"].logprobs == {}
    assert runner.slot_mapping == (28, 29, 30, 31, 4, 5, 6)
    events.clear()
    samples = (sequence("A1", (*PROMPT, FATHERS), (7, 3), 7, ((FATHERS, 21),)), sequence("A2", (*PROMPT, MOTHERS), (7, 1), 7, ((MOTHERS, 31),)))
    outputs = runner.execute(IterationPlan(samples, copies=((1, 3),)))
    assert {name: output.sampled[0].token_id for name, output in outputs.items()} == {"A1": 21, "A2": 31}
    assert [(kind_of(e), e.request_id) for e in events] == [
        ("row_updated", "A1"), ("row_updated", "A2"), ("blocks_copied", None),
        ("slots_mapped", "A1"), ("slots_mapped", "A2"), ("kv_written", "A1"), ("kv_written", "A2"),
    ]  # fmt: skip
    copied = events[2]
    assert isinstance(copied, BlocksCopied)
    assert (copied.cause.kind, copied.source_block_ids, copied.destination_block_ids) == (CauseKind.SHARED_BLOCK_WRITTEN, [1], [3])
    assert [e.slots for e in events if isinstance(e, SlotsMapped)] == [[15], [7]]
    written = [e for e in events if isinstance(e, KVWritten)]
    assert [(e.slots, e.token_ids, e.num_layers, e.backend) for e in written] == [([15], [FATHERS], 0, "none"), ([7], [MOTHERS], 0, "none")]
    assert [row.block_ids for row in runner.rows()] == [((7, 3),), ((7, 1),)]
    assert runner.slot_mapping == (15, 7)


def test_rows_stay_dense_and_say_why_they_change() -> None:
    """R8.2: a table that grew is appended to; who is not scheduled leaves; the last row moves into the gap."""
    runner, events = made()
    runner.execute(IterationPlan(tuple(sequence(name, PROMPT[:4], (block,), 0) for name, block in (("A", 0), ("B", 1), ("C", 2)))))
    events.clear()
    runner.execute(IterationPlan((sequence("B", PROMPT[:5], (1, 5), 4), sequence("C", PROMPT[:4], (2,), 3))))
    rows = [(e.request_id, e.row, e.start, e.block_ids, e.cause.kind, e.cause.facts) for e in events if isinstance(e, RowUpdated)]
    assert rows == [
        ("A", 0, 0, [], CauseKind.LEFT_BATCH, {}),
        ("B", 1, 1, [5], CauseKind.APPENDED, {}),
        ("C", 0, 0, [2], CauseKind.ADDED_TO_BATCH, {"from_row": 2}),
    ]
    assert [(row.row, row.request_id) for row in runner.rows()] == [(0, "C"), (1, "B")]
    assert runner.slot_mapping == (11, 20)


@pytest.mark.parametrize(
    ("row", "table", "start", "kind"),
    [
        ([7, 1], (7, 1), 2, None),
        ([7, 1], (7, 1, 3), 2, CauseKind.APPENDED),
        ([], (7,), 0, CauseKind.APPENDED),
        ([7, 1], (7, 3), 1, CauseKind.SHARED_BLOCK_WRITTEN),
        ([7, 1], (7, 3, 4), 1, CauseKind.SHARED_BLOCK_WRITTEN),
    ],
)
def test_what_a_row_needs(row: list[int], table: tuple[int, ...], start: int, kind: CauseKind | None) -> None:
    found, cause = row_change(row, table)
    assert (found, cause and cause.kind) == (start, kind)


def test_without_a_model_every_token_is_forced() -> None:
    """Nothing has changed when it is refused."""
    runner, events = made()
    with pytest.raises(InvalidInput, match="A1 has only 0; force more tokens, lower max_tokens or name a model"):
        runner.execute(IterationPlan((sequence("A1", PROMPT, (7, 1), 0, ((),)),)))
    assert (events, runner.rows()) == ([], ())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (IterationPlan((sequence("A", PROMPT, (7, 1), 0), sequence("A", PROMPT, (2, 3), 0))), "each can be in it only once"),
        (IterationPlan((sequence("A", PROMPT, (7, 1), 7),)), "0 tokens of sequence A are scheduled from position 7 on, but it has 7"),
        (IterationPlan((sequence("A", PROMPT, (7,), 0),)), "too few for 7 tokens"),
        (IterationPlan((sequence("A", PROMPT, (7, 9), 0),)), "names block 9, but the pool's blocks are 0 to 8"),
        (IterationPlan((sequence("A", (*PROMPT, 20), (7, 1), 7), sequence("B", (*PROMPT, 30), (7, 1), 7))), "A and B would both write to slot 7 of block 1"),
        (IterationPlan((), copies=((1, 3), (2, 3))), "a block can take only one copy"),
        (IterationPlan((ScheduledSequence("A", PROMPT, (7, 1), 0, 4, 7, 0, num_logprobs=2),)), "computes 4 of 7 tokens"),
        (IterationPlan((ScheduledSequence("A", PROMPT, (7, 1), 0, 7, 7, 0, draw_names=("A",)),)), "0 draws and 1 names"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_in_one_sentence(plan: IterationPlan, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        check_plan(plan, block_size=4, num_blocks=9)
    assert isinstance(caught.value, PagewalkError)
    assert "\n" not in str(caught.value)


def test_it_loads_no_torch() -> None:
    code = "import sys, engine.paper_bookkeeping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
