"""Frames of the paper's engine: what the ledger, the invariants and the files say about forks, copies and the swap space (sections 4.4 and 4.5)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper_session import PaperConfig, PaperRequestSpec, PaperSession
from engine.trace import codec, running_check
from engine.trace.events import BlocksSwappedIn, BlocksSwappedOut, Cause, CauseKind, EngineFailed, KVWritten
from engine.trace.frame import BlockOwner, Frame, RequestState
from engine.trace.integrity import check_integrity
from engine.trace.running_check import RunningCheck
from engine.trace.shared_sequence import SharedSequence
from engine.trace.slot_ledger import SlotLedger
from tests.unit.trace import frames as f

EMPTY = (None, None, None, None)
SWAPPED = Cause(CauseKind.SWAPPED)
TWO = PaperRequestSpec("A", tuple(range(100, 107)), max_tokens=3, n=2, forced_token_ids=((1, 2, 3), (4, 5, 6)))


def broken(frame: Frame, previous: Frame | None = None) -> set[str]:
    return {v.invariant for v in check_integrity(frame, previous)}


# ------------------------------------------------------------------ a shared block is copied before it is written
def fork(**changes: Any) -> Frame:
    """A1 and its fork A2 share block 1, of which three slots are filled; each has a token of its own for the fourth. Block 0 is one like any other."""
    owners = (BlockOwner("A1", 0, 0), BlockOwner("A2", 0, 0))
    shared = f.block(1, ref_cnt=2, token_ids=(10, 11, 12, None), owners=owners)
    blocks = (f.block(0, is_null=False), shared, f.block(2), f.block(3))
    requests = tuple(RequestState(name, "RUNNING", 3, (10, 11, 12, own), 4, ((1,),), (), (), parent_id=parent) for name, own, parent in SAMPLES)
    return f.frame(**{"blocks": blocks, "free_queue": (0, 2, 3), "hash_map": (), "requests": requests, **changes})


SAMPLES = (("A1", 1, None), ("A2", 2, "A1"))


def test_a_shared_block_is_a_sound_frame() -> None:
    assert broken(fork()) == set()


def test_a_write_without_its_copy_is_found_although_the_slot_is_empty() -> None:
    """Section 4.4: both samples want the fourth slot of block 1, so whoever comes first has to copy."""
    violations = check_integrity(fork(event=f.write([7], [1], "A1"), seq=1), fork())
    assert [(v.invariant, v.block_id) for v in violations] == [("nothing shared is overwritten", 1)]
    assert violations[0].message == "slot 7 of block 1 is written without a copy, but A2 shares the block and has another token there"


def test_a_request_must_not_write_behind_the_end_of_a_prefix_either() -> None:
    """Figure 10: the kept prefix has no token in that slot, and none of anybody's belongs there."""
    prefix = RequestState("P", "PREFIX_KEPT", 3, (10, 11, 12), 3, ((1,),), (), ())
    request = RequestState("A1", "RUNNING", 4, (10, 11, 12, 1), 4, ((1,),), (), (), parent_id="P")
    blocks = list(fork().blocks)
    blocks[1] = msgspec.structs.replace(blocks[1], owners=(BlockOwner("P", 0, 0), BlockOwner("A1", 0, 0)))
    before = fork(blocks=tuple(blocks), requests=(prefix, request))
    assert broken(before) == set()
    assert broken(msgspec.structs.replace(before, event=f.write([7], [1], "A1"), seq=1), before) == {"nothing shared is overwritten"}


def test_computing_a_shared_block_again_is_fine_where_all_have_the_same_token() -> None:
    """A recomputed group shares full blocks before they are written: the first sequence writes for all."""
    empty = [msgspec.structs.replace(b, token_ids=EMPTY, num_filled=0) if b.block_id == 1 else b for b in fork().blocks]
    before = fork(blocks=tuple(empty))
    assert broken(msgspec.structs.replace(before, event=f.write([4, 5, 6], [10, 11, 12], "A1"), seq=1), before) == set()


def test_an_engine_that_forgets_to_copy_is_stopped_by_the_ledger() -> None:
    with patch.object(BlockSpaceManager, "append_slot", lambda self, sequence: None), patch("engine.paper_bookkeeping.check_plan"):
        made = PaperSession(PaperConfig(num_blocks=9, block_size=4), (TWO,), vocabulary=str)
        trace = made.run_to_end()
    assert "breaks “nothing shared is overwritten”: slot 7 of block 1 is written without a copy, but A2 shares the block" in str(made.error)
    assert isinstance(trace.frames[-1].event, EngineFailed)
    assert isinstance(trace.frames[-2].event, KVWritten)


# ------------------------------------------------------------------ the swap space
def swapped(**changes: Any) -> Frame:
    """A lies in the swap space: blocks 1 and 0 there, of three."""
    owners = ((BlockOwner("A", 0, 1),), (BlockOwner("A", 0, 0),), ())
    cpu_blocks = tuple(f.block(i, is_null=False, ref_cnt=len(o), owners=o, token_ids=(i, i, i, i) if o else EMPTY) for i, o in enumerate(owners))
    request = RequestState("A", "SWAPPED", 6, (1, 1, 1, 1, 0, 0), 6, ((),), (), (), cpu_block_ids=(1, 0))
    blocks = (f.block(0, is_null=False), f.block(1))
    fields: dict[str, Any] = {"blocks": blocks, "free_queue": (0, 1), "hash_map": (), "requests": (request,), "running": (), "swapped": ("A",)}
    return f.frame(**{**fields, "cpu_blocks": cpu_blocks, "cpu_free_queue": (2,), **changes})


def test_a_swapped_sequence_is_a_sound_frame() -> None:
    assert broken(swapped()) == set()


def test_the_swap_space_is_counted_like_the_pool() -> None:
    assert broken(swapped(cpu_free_queue=())) == {"free + used + null = all", "queued iff ref_cnt is 0"}
    assert broken(swapped(cpu_free_queue=(2, 2))) == {"free + used + null = all", "each block once in the free queue"}
    assert "queued iff ref_cnt is 0" in broken(swapped(cpu_free_queue=(0, 2)))
    assert "free + used + null = all" in broken(swapped(cpu_free_queue=(2, 7)))
    blocks = list(swapped().cpu_blocks)
    blocks[0] = msgspec.structs.replace(blocks[0], ref_cnt=2)
    assert broken(swapped(cpu_blocks=tuple(blocks))) == {"ref_cnt = table entries + pins"}
    blocks[0] = msgspec.structs.replace(blocks[0], ref_cnt=1, owners=())
    assert broken(swapped(cpu_blocks=tuple(blocks))) == {"owners = block table entries"}


def test_its_sentences_say_which_memory_they_are_about() -> None:
    assert check_integrity(swapped(cpu_free_queue=(0, 2)))[0].message == "in the swap space, block 0 is in the free queue with ref_cnt 1"


def test_nobody_is_in_both_memories() -> None:
    request = msgspec.structs.replace(swapped().requests[0], block_ids=((0,),))
    blocks = (f.block(0, is_null=False, ref_cnt=1, owners=(BlockOwner("A", 0, 0),)), f.block(1))
    frame = swapped(requests=(request,), blocks=blocks, free_queue=(1,))
    assert broken(frame) == {"a sequence lies on the GPU or in the swap space"}


def test_pages_move_to_the_swap_space_and_back() -> None:
    ledger = SlotLedger(4, 4, num_cpu_blocks=3)
    ledger.apply(f.write([4, 5, 6, 7, 8], [10, 11, 12, 13, 14]))
    out = BlocksSwappedOut(cause=SWAPPED, gpu_block_ids=[1, 2], cpu_block_ids=[2, 0], prepended=[2], still_referenced=[1])
    ledger.apply(out)
    assert ledger.cpu_content == [(14, None, None, None), EMPTY, (10, 11, 12, 13)]
    assert ledger.content == [EMPTY, (10, 11, 12, 13), EMPTY, EMPTY]  # block 1 has another reader and stays
    ledger.apply(f.write([8], [99]))
    ledger.apply(BlocksSwappedIn(cause=SWAPPED, cpu_block_ids=[0, 2], gpu_block_ids=[3, 2]))
    assert ledger.content == [EMPTY, (10, 11, 12, 13), (10, 11, 12, 13), (14, None, None, None)]
    assert ledger.cpu_content == [EMPTY, EMPTY, EMPTY]


# ------------------------------------------------------------------ whole runs
def swapping_run(num_blocks: int = 5) -> list[Frame]:
    """A group of two samples gives way to an earlier request and comes back."""
    config = PaperConfig(num_blocks=num_blocks, block_size=4, num_cpu_blocks=6, preemption_mode="swap", max_num_batched_tokens=4 * num_blocks)
    first = PaperRequestSpec("Z", tuple(range(50, 50 + 4 * num_blocks - 12)), max_tokens=6, forced_token_ids=((7,) * 6,))
    made = PaperSession(config, (first, TWO), vocabulary=str)
    frames = made.run_to_end().frames
    assert made.error is None
    assert {type(frame.event) for frame in frames} >= {BlocksSwappedOut, BlocksSwappedIn}
    return frames


def test_counting_on_finds_what_is_wrong_in_the_swap_space_too() -> None:
    """The check that costs what changed says of every frame what the whole one says, broken frames included."""
    frames = swapping_run()
    place = next(i for i, frame in enumerate(frames) if isinstance(frame.event, BlocksSwappedOut))
    wrong = msgspec.structs.replace(frames[place], cpu_free_queue=frames[place].cpu_free_queue[1:])
    with patch.object(running_check, "SMALL_POOL", 0), patch.object(running_check, "BLOCKS_PER_FRAME", 1e-9):
        check = RunningCheck()
        for previous, frame in zip([None, *frames], frames[:place], strict=False):
            assert check.check(frame, previous) == []
        found = check.check(wrong, frames[place - 1])
    assert found == check_integrity(wrong, frames[place - 1])
    assert found != []


@pytest.mark.parametrize("num_blocks", [5, 40])
def test_every_frame_of_a_run_is_sound_and_comes_back_from_a_file_as_shared_as_it_was(num_blocks: int) -> None:
    frames = swapping_run(num_blocks)
    for previous, frame in zip([None, *frames], frames, strict=False):
        assert check_integrity(frame, previous) == []
    trace = f.trace(*frames)
    back = codec.decode_json(codec.encode_json(trace))
    assert back == trace
    assert codec.encode_json(back) == codec.encode_json(trace)
    for before, frame in pairwise(back.frames):
        for name in ("blocks", "requests", "cpu_blocks"):
            new, old = getattr(frame, name), getattr(before, name)
            assert isinstance(new, SharedSequence)
            assert (new is old) == (new == old)
