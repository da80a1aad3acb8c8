"""Counting on from frame to frame finds what looking at whole frames finds, for every invariant and at any size, without looking at all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from engine.core.output import SamplingParams
from engine.session import Session
from engine.session_config import RequestSpec, SessionConfig
from engine.trace import running_check
from engine.trace.events import BlocksFreed, KVWritten
from engine.trace.frame import BlockOwner, BlockState, Frame
from engine.trace.integrity import Violation, check_block, check_integrity
from engine.trace.running_check import RunningCheck
from engine.trace.shared_sequence import ABSENT, Absent, SharedSequence


def run(num_blocks: int) -> list[Frame]:
    """Two requests with one prompt, one after the other: allocation, hashes, writes, a hit, frees."""
    requests = tuple(
        RequestSpec(name, tuple(range(9)), SamplingParams(max_tokens=3, forced_token_ids=(1, 2, 3)), arrival_step=step) for name, step in (("A", 1), ("B", 3))
    )
    return Session(SessionConfig(num_blocks=num_blocks, block_size=4), requests, vocabulary=str).run_to_end().frames


FRAMES = run(12)
LARGE = 5_000


@contextmanager
def counting_on() -> Iterator[None]:
    """Whatever the size of the pool, and without looking at whole frames in between."""
    with patch.object(running_check, "SMALL_POOL", 0), patch.object(running_check, "BLOCKS_PER_FRAME", 1e-9):
        yield


def changed_block(frame: Frame, block_id: int, **changes: Any) -> Frame:
    blocks = frame.blocks
    assert isinstance(blocks, SharedSequence)
    state: BlockState = msgspec.structs.replace(blocks[block_id], **changes)
    return msgspec.structs.replace(frame, blocks=blocks.with_changes({block_id: state}))


def changed_queue(frame: Frame, changes: dict[int, int | Absent]) -> Frame:
    queue = frame.free_queue
    assert isinstance(queue, SharedSequence)
    return msgspec.structs.replace(frame, free_queue=queue.with_changes(changes))


def changed_map(frame: Frame, change: Callable[[tuple[str, tuple[int, ...]]], tuple[str, tuple[int, ...]] | Absent]) -> Frame:
    entries = frame.hash_map
    assert isinstance(entries, SharedSequence)
    place, entry = next(entries.places())
    return msgspec.structs.replace(frame, hash_map=entries.with_changes({place: change(entry)}))


def used(frame: Frame) -> int:
    return next(b.block_id for b in frame.blocks if b.ref_cnt)


def free(frame: Frame) -> int:
    return frame.free_queue[-1]


def last_place(frame: Frame) -> int:
    assert isinstance(frame.free_queue, SharedSequence)
    return [place for place, _ in frame.free_queue.places()][-1]


BREAKS: dict[str, Callable[[Frame], Frame]] = {
    "a reference too many": lambda f: changed_block(f, used(f), ref_cnt=9),
    "a reference too few": lambda f: changed_block(f, used(f), ref_cnt=0),
    "a free block in use": lambda f: changed_block(f, free(f), ref_cnt=1),
    "a pin without a reference": lambda f: changed_block(f, free(f), pins=("copy",)),
    "an owner without a table": lambda f: changed_block(f, free(f), owners=(BlockOwner("A", 0, 0),)),
    "a key without an entry": lambda f: changed_block(f, free(f), block_hashes=("ab:0",), num_hash_tokens=4),
    "an entry of another block": lambda f: changed_map(f, lambda entry: (entry[0], (free(f),))),
    "an entry of no block": lambda f: changed_map(f, lambda entry: (entry[0], (*entry[1], 999))),
    "an entry gone": lambda f: changed_map(f, lambda entry: ABSENT),
    "a block gone from the queue": lambda f: changed_queue(f, {last_place(f): ABSENT}),
    "a block queued twice": lambda f: changed_queue(f, {last_place(f) + 1: free(f)}),
    "a used block queued": lambda f: changed_queue(f, {last_place(f) + 1: used(f)}),
    "the null block queued": lambda f: changed_queue(f, {last_place(f) + 1: 0}),
    "no block queued": lambda f: changed_queue(f, {last_place(f) + 1: 999}),
    "the null block hashed": lambda f: changed_block(f, 0, block_hashes=("ab:0",), num_hash_tokens=4),
    "a hashed block emptied and left": lambda f: changed_block(f, used(f), token_ids=(None,) * 4, num_filled=0, owners=()),
    "a table entry too many": lambda f: with_table(f, (*f.requests[0].block_ids[0], free(f))),
    "a table emptied": lambda f: with_table(f, ()),
}


def with_table(frame: Frame, table: tuple[int, ...]) -> Frame:
    requests = frame.requests
    assert isinstance(requests, SharedSequence)
    return msgspec.structs.replace(frame, requests=requests.with_changes({0: msgspec.structs.replace(requests[0], block_ids=(table,))}))


def found(violations: list[Violation]) -> set[tuple[str, str, int | None]]:
    return {(v.invariant, v.message, v.block_id) for v in violations}


@pytest.mark.parametrize("what", BREAKS)
def test_every_broken_invariant_is_found_as_in_a_whole_frame(what: str) -> None:
    """Broken after a write of A while B is not there yet, so that blocks are used, hashed and free."""
    position = next(i for i, f in enumerate(FRAMES) if isinstance(f.event, KVWritten) and f.step == 2)
    for index in range(position, position + 3):
        broken = BREAKS[what](FRAMES[index])
        with counting_on():
            check = RunningCheck()
            for before, frame in zip([None, *FRAMES], FRAMES[:index], strict=False):
                assert check.check(frame, before) == []
            assert check._recount is not None
            assert found(check.check(broken, FRAMES[index - 1])) == found(check_integrity(broken, FRAMES[index - 1])) != set()


def test_what_was_pending_must_be_there_when_the_model_has_run() -> None:
    """S9: a hashed block may wait for its keys and values during the step that computes them, and no longer; the block itself does not change then."""
    position = next(i for i, f in enumerate(FRAMES) if f.op == "update_from_output")
    with counting_on():
        check = RunningCheck()
        frames = [f for f in FRAMES[:position] if not isinstance(f.event, KVWritten)]
        kept = next(f for f in reversed(frames) if f.op == "execute_model")
        for before, frame in zip([None, *frames], frames, strict=False):
            assert check.check(frame, before) == []
        late = msgspec.structs.replace(FRAMES[position], blocks=kept.blocks)
        assert "only full blocks are hashed" in {v.invariant for v in check.check(late, frames[-1])}


def test_a_large_pool_is_not_looked_at_as_a_whole_for_every_event() -> None:
    """Blocks looked at per event, from the second frame on: as many as the event concerns, however many the pool has."""
    looked_at: list[int] = []

    def counting(block: BlockState, *args: Any) -> Any:
        looked_at.append(block.block_id)
        return check_block(block, *args)

    numbers = []
    for num_blocks in (LARGE, 4 * LARGE):
        looked_at.clear()
        with patch.object(running_check, "check_block", counting):
            frames = run(num_blocks)
        assert isinstance(frames[-1].event, BlocksFreed)
        numbers.append(len(looked_at))
    assert numbers[0] == numbers[1] < 10 * len(FRAMES)


def test_small_pools_and_frames_made_by_hand_are_looked_at_as_a_whole() -> None:
    check = RunningCheck()
    for before, frame in zip([None, *FRAMES], FRAMES, strict=False):
        assert check.check(frame, before) == []
        assert check._recount is None
    with counting_on():
        by_hand = [msgspec.structs.replace(f, blocks=tuple(f.blocks)) for f in FRAMES]
        broken = msgspec.structs.replace(by_hand[5], free_queue=())
        check = RunningCheck()
        assert check.check(by_hand[4], None) == []
        assert found(check.check(broken, by_hand[4])) == found(check_integrity(broken, by_hand[4])) != set()


def test_whole_frames_come_round() -> None:
    """What was broken outside every difference is found by the next look at a whole frame."""
    with patch.object(running_check, "SMALL_POOL", 0), patch.object(running_check, "BLOCKS_PER_FRAME", 2):
        check = RunningCheck()
        assert check.check(FRAMES[5], None) == []
        assert check.check(FRAMES[5], FRAMES[5]) == []
        broken = changed_block(FRAMES[5], used(FRAMES[5]), ref_cnt=9)
        rounds = [check.check(broken, broken) for _ in range(20)]
        assert rounds[0] == []
        assert any(rounds)
