"""The slot mapping as its programs did it, in whole runs of the embedded models; and mistakes in rows, positions and padding, each by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engine.worker.batch_runner as batch_runner
from engine.core.output import SamplingParams
from engine.models import load_model
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.batch_rows import BatchRow
from engine.trace.codec import decode_json, encode_json
from engine.trace.events import AttentionComputed
from engine.trace.integrity import IntegrityError
from engine.trace.mapping_check import LOOKS_UP_OWN, MAPS_ALL, MAPS_ONE, MAPS_POSITIONS, PADS_REST, check_mapping
from engine.trace.witness import MappingProgramWitness, MappingWitness, slots_in
from engine.trace.witness_check import WRITES_MAPPED
from engine.worker.block_table import BlockTable

PASSAGES = ("Four score and seven years ago our fathers brought forth on this continent", "It was the best of times, it was the worst of times")


def run(model_name: str = "tiny", layers: Any = (0,), **settings: Any) -> Session:
    encode = load_model(model_name).tokenizer.encode
    specs = [RequestSpec(name, tuple(encode(text)), SamplingParams(max_tokens=6)) for name, text in zip("AB", PASSAGES, strict=True)]
    config = SessionConfig(**{"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 20, "kernel_witness": True, **settings})
    return Session(config, tuple(specs), vocabulary=str, model_name=model_name, interpreted_layers=layers)


def broken(session: Session) -> IntegrityError:
    session.run_to_end()
    assert isinstance(session.error, IntegrityError), session.error
    return session.error


@pytest.mark.parametrize(("model_name", "layers", "groups"), [("tiny", (0,), [0]), ("tiny-swa", "all", [0, 1, 2]), ("tiny-swa", (0,), None), ("tiny", (), [])])
def test_every_token_s_slot_in_every_group_with_interpreted_layers(model_name: str, layers: Any, groups: list[int] | None) -> None:
    """R8.4 from the frame's tables; places behind the batch get none (R8.5)."""
    session = run(model_name, layers)
    frames = session.run_to_end().frames
    assert session.error is None
    events = [(frame, frame.event) for frame in frames if isinstance(frame.event, AttentionComputed)]
    assert events
    for frame, event in events:
        told = [launch.group_id for launch in event.mapping_witness]
        assert told == groups or (groups is None and len(told) == 1)
        for launch in event.mapping_witness:
            stored = {t: s for p in launch.programs for t, s in zip(slots_in(p.tokens), p.slots or [-1] * launch.num_places, strict=False)}
            due = []
            for request_id, query_len, seq_len in zip(event.request_ids, event.query_lens, event.seq_lens, strict=True):
                request = frame.request(request_id)
                assert request is not None
                table = request.block_ids[launch.group_id]
                due += [table[p // 4] * 4 + p % 4 for p in range(seq_len - query_len, seq_len)]
                assert any(p.request_id == request_id and p.block_ids_read for p in launch.programs)
            assert [stored[token] for token in range(launch.num_places)] == due + [-1] * (launch.num_places - len(due))


def test_traces_keep_it() -> None:
    trace = run("tiny-swa", "all").run_to_end()
    assert decode_json(encode_json(trace)).frames == trace.frames


# ------------------------------------------------------------------ mistakes


def test_a_row_that_differs_from_the_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8.3: two blocks of the request's own change places in the device's row, so that every block that is written is its own."""
    commit = BlockTable.commit_block_table

    def exchanged(self: BlockTable, num_reqs: int) -> None:
        commit(self, num_reqs)
        self.block_table[0, :2] = self.block_table[0, :2].flip(0)

    monkeypatch.setattr(BlockTable, "commit_block_table", exchanged)
    session = run()
    error = broken(session)
    assert error.violations[0].invariant == LOOKS_UP_OWN
    (table,) = session.trace.frames[-2].requests[0].block_ids
    expected = f"program 0, lane 0 of the slot mapping of group 0 found block {table[1]} in column 0 of row 0 for A, where its block table has block {table[0]}"
    assert expected in str(error)


def _given(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The kernel is given other tensors than the rest of the step."""
    compute = BlockTable.compute_slot_mapping

    def wrapped(self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor, *rest: Any) -> None:
        compute(self, num_reqs, *change(query_start_loc.clone(), positions.clone()), *rest)

    monkeypatch.setattr(BlockTable, "compute_slot_mapping", wrapped)


def test_a_wrong_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of one block change places: every slot is the request's own and none is written twice."""

    def exchanged(query_start_loc: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions[:2] = positions[:2].flip(0)
        return query_start_loc, positions

    _given(monkeypatch, exchanged)
    session = run()
    error = broken(session)
    assert error.violations[0].invariant == MAPS_POSITIONS
    (table,) = session.trace.frames[-2].requests[0].block_ids
    assert f"gave position 0 of A the slot {4 * table[0] + 1}, to which its block table gives slot {4 * table[0]}" in str(error)


def test_a_batch_that_ends_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that pads goes over the last token of the batch."""

    def shorter(query_start_loc: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query_start_loc[-1] -= 1
        return query_start_loc, positions

    _given(monkeypatch, shorter)
    # The rest of the step is told the right slot: the check of what was written would stop the run otherwise.
    report_slots = batch_runner.BatchRunner._report_slots

    def mended(self: batch_runner.BatchRunner, parts: Any, slots: dict[int, list[int]]) -> None:
        part = parts[-1]
        table, position = self.block_table[0].row(len(parts) - 1), part.position + part.end - part.start - 1
        slots[0][-1] = table[position // 4] * 4 + position % 4
        report_slots(self, parts, slots)

    monkeypatch.setattr(batch_runner.BatchRunner, "_report_slots", mended)
    error = broken(run(max_num_batched_tokens=64))
    assert error.violations[0].invariant == MAPS_ONE
    assert "program 1, lane 0 of the slot mapping of group 0 stored the slots of B and of places behind the batch" in str(error)


def test_padding_with_a_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.launch.PAD_SLOT_ID", 9)
    error = broken(run(max_num_batched_tokens=64))
    assert error.violations[0].invariant == PADS_REST
    assert "stored slot 9 at place" in str(error)


def test_another_group_s_slots_are_held_against_its_own_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping of group 1 is reported as it should be, but its kernel is given another: the last token goes to the slot before."""
    report_slots = batch_runner.BatchRunner._report_slots

    def misplace(self: batch_runner.BatchRunner, parts: Any, slots: dict[int, list[int]]) -> None:
        report_slots(self, parts, slots)
        self.block_table[1].slot_mapping[len(slots[1]) - 1] -= 1

    monkeypatch.setattr(batch_runner.BatchRunner, "_report_slots", misplace)
    session = run("tiny-swa", "all")
    error = broken(session)
    event = session.trace.frames[-2].event
    assert isinstance(event, AttentionComputed)
    due = event.slot_mappings[1][-1]
    assert due != session.trace.frames[-2].slot_mapping[-1]  # that of group 0
    assert {v.invariant for v in error.violations} == {WRITES_MAPPED}
    assert f"wrote slot {due - 1} of block {(due - 1) // 4} for B, but the slot mapping of group 1 names slot {due}" in str(error)


ROWS = [BatchRow("A", 0, 2, 4, (7, 3)), BatchRow("B", 2, 3, 0, (5,))]
"""Positions 4 and 5 of A, position 0 of B, blocks of 4."""


def launch(*programs: MappingProgramWitness) -> MappingWitness:
    return MappingWitness(group_id=0, grid=2, lanes=2, block_size=4, num_places=5, programs=list(programs))


A = MappingProgramWitness(0, 0, "A", [(0, 2)], [12, 13], [0], [1], [3])
B = MappingProgramWitness(0, 1, "B", [(2, 3)], [20], [1], [0], [5])
REST = MappingProgramWitness(1, 0, None, [(3, 5)])


@pytest.mark.parametrize(
    ("programs", "names"),
    [
        ((A, B, REST), []),
        ((A, REST), [MAPS_ALL]),
        ((A, B, B, REST), [MAPS_ALL]),
        ((A, B), [PADS_REST]),
        ((A, MappingProgramWitness(0, 1, "B", [(2, 3)], [20], [0], [0], [7]), REST), [LOOKS_UP_OWN]),
        ((A, MappingProgramWitness(0, 1, "B", [(2, 3)], [20], [1], [0, 1], [5, 6]), REST), [LOOKS_UP_OWN, MAPS_POSITIONS]),
        ((MappingProgramWitness(0, 0, None, [(0, 3)], [12, 13, 20], [0], [1], [3]), REST), [MAPS_ONE]),
    ],
)
def test_made_up_launches(programs: tuple[MappingProgramWitness, ...], names: list[str]) -> None:
    assert [violation.invariant for violation in check_mapping(launch(*programs), ROWS)] == names
