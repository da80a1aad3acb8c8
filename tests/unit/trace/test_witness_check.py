"""Every rule about the kernels' programs is broken once on purpose, on a frame made by hand; a sound one is silent."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.events import AttentionComputed, Cause, CauseKind
from engine.trace.frame import Frame, RequestState
from engine.trace.integrity import Violation, check_integrity
from engine.trace.witness import LaunchWitness, ProgramWitness, runs_of, slots_in
from engine.trace.witness_check import ANSWERS_ALL, ONE_REQUEST, READS_ALL, READS_OWN, WRITES_ALL, WRITES_MAPPED
from tests.unit.trace import frames as f

A = RequestState("A", "RUNNING", 6, (10, 11, 12, 13, 14, 15), 6, ((5, 6),), (), (None,))
B = RequestState("B", "RUNNING", 9, tuple(range(20, 29)), 9, ((2, 9, 4),), (), (None,))
"""Blocks of 4. This step computes A's last two tokens and B's last one: slots 24, 25 of block 6 and slot 16 of block 4."""


def reads(lane: int, whose: str, **changes: Any) -> ProgramWitness:
    head = lane % 2
    plain = {
        "A": ProgramWitness(0, lane, "A", [0, 1], [head], [5, 6], [(20, 26)]),
        "B": ProgramWitness(0, lane, "B", [2], [head], [2, 9, 4], [(8, 12), (36, 40), (16, 17)]),
    }
    return msgspec.structs.replace(plain[whose], **changes)


def writes(**changes: Any) -> LaunchWitness:
    programs = [ProgramWitness(0, 0, "A", [0, 1], [0, 1], slots_written=[24, 25]), ProgramWitness(0, 2, "B", [2], [0, 1], slots_written=[16])]
    programs[0] = msgspec.structs.replace(programs[0], **changes)
    return LaunchWitness("reshape_and_cache", [0], 1, 4, 4, programs)


def attends(*programs: ProgramWitness, sliding_window: int | None = None) -> LaunchWitness:
    return LaunchWitness("paged_attention", [0, 3], 1, 4, 4, [*programs], sliding_window=sliding_window)


ALL = (reads(0, "A"), reads(1, "A"), reads(2, "B"), reads(3, "B"))


def frame(*launches: LaunchWitness, **changes: Any) -> Frame:
    event = AttentionComputed(
        cause=Cause(CauseKind.COMPARED_WITH_REFERENCE), backend="interpret", layers=[0, 3], agrees_within=1e-6, query_lens=[2, 1], seq_lens=[6, 9],
        request_ids=["A", "B"], witness=[*launches] or None,
    )  # fmt: skip
    return f.frame(event, **{"requests": (A, B), "slot_mapping": (24, 25, 16), **changes})


def found(*launches: LaunchWitness, **changes: Any) -> list[Violation]:
    """Violations about programs alone: the frame's blocks are not made for these tables."""
    names = {ANSWERS_ALL, ONE_REQUEST, READS_ALL, READS_OWN, WRITES_ALL, WRITES_MAPPED}
    return [v for v in check_integrity(frame(*launches, **changes)) if v.invariant in names]


def only(violations: list[Violation], invariant: str) -> list[str]:
    assert {v.invariant for v in violations} == {invariant}
    return [v.message for v in violations]


def test_a_sound_step_and_one_without_a_witness() -> None:
    assert found(writes(), attends(*ALL)) == []
    assert found() == []


def test_a_foreign_block_is_named_with_program_and_request() -> None:
    """R8.3, R8.4: the row that the kernel walks may be stale; then it reads what the request does not own."""
    stale = reads(1, "A", block_ids_read=[9, 6], slots_read=[(36, 40), (24, 26)])
    violations = found(attends(ALL[0], stale, *ALL[2:]))
    assert [v.block_id for v in violations if v.invariant == READS_OWN] == [9]
    assert violations[0].message == "program 0, lane 1 of paged_attention in layers 0, 3 read keys of block 9 for A, whose block table is [5, 6]"


def test_values_are_checked_like_keys() -> None:
    violations = found(attends(ALL[0], reads(1, "A", value_slots_read=[(36, 40), (24, 26)]), *ALL[2:]))
    assert "read values of block 9 for A" in violations[0].message


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ([(20, 27)], "read the key in slot 2 of block 6 for A, which its queries do not see"),
        ([(20, 25)], "did not read the key in slot 1 of block 6 for A, which its queries see"),
        ([(24, 26), (20, 24)], "read the keys of A in the order [6, 5], but the block table has [5, 6]"),
    ],
)
def test_a_program_reads_every_key_that_its_queries_see_and_no_other(slots: list[tuple[int, int]], says: str) -> None:
    """The paper, section 4.1: causal attention over the tokens so far, block by block."""
    (message,) = only(found(attends(reads(0, "A", slots_read=slots), *ALL[1:])), READS_ALL)
    assert message.endswith(says)


def test_a_window_ends_what_may_be_read() -> None:
    """R3.2: a query sees its window's keys only. With a window of 3, A's first query sees from position 2 on, B's from 6 on."""
    a = [reads(lane, "A", block_ids_read=[5, 6], slots_read=[(22, 26)]) for lane in (0, 1)]
    b = [reads(lane, "B", block_ids_read=[9, 4], slots_read=[(38, 40), (16, 17)]) for lane in (2, 3)]
    assert found(attends(*a, *b, sliding_window=3)) == []
    (message,) = only(found(attends(reads(0, "A"), a[1], *b, sliding_window=3)), READS_ALL)
    assert "read the key in slot 0 of block 5 for A, which its queries do not see" in message


def test_a_window_over_null_blocks() -> None:
    """R3.2: skipped blocks are the null block in the manager's table, and nobody reads them."""
    skipped = msgspec.structs.replace(B, block_ids=((0, 9, 4),))
    b = [reads(lane, "B", block_ids_read=[9, 4], slots_read=[(38, 40), (16, 17)]) for lane in (2, 3)]
    a = [reads(lane, "A", slots_read=[(22, 26)]) for lane in (0, 1)]
    assert found(attends(*a, *b, sliding_window=3), requests=(A, skipped)) == []


def test_a_program_with_tokens_of_two_requests() -> None:
    violations = found(attends(reads(0, "A", tokens=[1, 2], request_id=None), *ALL[1:]))
    assert violations[0].invariant == ONE_REQUEST
    assert "lane 0 of paged_attention in layers 0, 3 worked for the tokens 1, 2 of the batch, which are not those of one request (A and B)" in str(
        violations[0]
    )
    assert found(attends(reads(0, "A", tokens=[7], request_id=None), *ALL[1:]))[0].invariant == ONE_REQUEST


def test_nobody_is_left_out_and_nobody_computed_twice() -> None:
    for programs in (ALL[:3], (*ALL, ALL[3])):
        (message,) = only(found(attends(*programs)), ANSWERS_ALL)
        assert "position 8 of B" in message


def test_a_slot_that_the_mapping_does_not_name() -> None:
    (message,) = only(found(writes(slots_written=[24, 27])), WRITES_MAPPED)
    assert message.endswith("wrote slot 27 of block 6 for A, but the slot mapping names slot 25")
    (message,) = only(found(writes(value_slots_written=[24, 36])), WRITES_MAPPED)
    assert "wrote slot 36 of block 9 for A" in message


def test_a_mapping_that_the_table_does_not_give() -> None:
    """R8.4: block 6 is A's second block, position 4 its slot 0; the mapping says slot 2 and the kernel followed."""
    (message,) = only(found(writes(slots_written=[26, 25]), slot_mapping=(26, 25, 16)), WRITES_MAPPED)
    assert message.endswith("wrote slot 26 of block 6 for position 4 of A, to which its block table gives slot 24")
    short = msgspec.structs.replace(A, block_ids=((5,),))
    assert "gives no slot" in only(found(writes(), requests=(short, B)), WRITES_MAPPED)[0]


def test_every_token_is_stored_once() -> None:
    lost = writes()
    lost.programs.pop()
    assert "did not store the tokens 2 of the batch once each" in only(found(lost), WRITES_ALL)[0]
    twice = writes()
    twice.programs.append(twice.programs[-1])
    assert "did not store the tokens 2 of the batch once each" in only(found(twice), WRITES_ALL)[0]
    (short,) = [v for v in found(writes(slots_written=[24])) if v.invariant == WRITES_MAPPED]
    assert "wrote 1 slots for 2 tokens of A" in short.message


@given(st.lists(st.integers(0, 40), unique=True))
def test_runs_are_the_walk(slots: list[int]) -> None:
    runs = runs_of(slots)
    assert [*slots_in(runs)] == slots
    assert all(end != start for (_, end), (start, _) in itertools.pairwise(runs)), "as few as can be"
