"""Every invariant is broken once on purpose: the ledger must name the right one, and be silent on a sound frame."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.trace.frame import BlockOwner
from engine.trace.integrity import IntegrityError, check_integrity
from tests.unit.trace import frames as f


def broken(frame: Any, previous: Any = None) -> set[str]:
    return {v.invariant for v in check_integrity(frame, previous)}


def test_a_sound_frame_has_no_violation() -> None:
    assert check_integrity(f.frame()) == []


def test_a_block_that_vanishes_from_the_queue_is_found() -> None:
    """R1.7: ref_cnt 0 and not null means queued."""
    assert "queued iff ref_cnt is 0" in broken(f.frame(free_queue=()))


def test_a_used_block_in_the_queue_is_found() -> None:
    """R1.6: adopting a block unlinks it."""
    assert "queued iff ref_cnt is 0" in broken(f.frame(free_queue=(3, 2)))


def test_a_block_queued_twice_is_found() -> None:
    assert "each block once in the free queue" in broken(f.frame(free_queue=(3, 3)))


def test_a_queued_block_the_pool_does_not_have_is_found() -> None:
    assert "free + used + null = all" in broken(f.frame(free_queue=(3, 99)))


def test_the_null_block_is_never_free_and_never_hashed() -> None:
    """R1.2."""
    assert "null block never free" in broken(f.frame(free_queue=(0, 3)))
    assert "null block never hashed" in broken(f.with_block(f.frame(), 0, block_hashes=(f.KEY,)))


def test_a_reference_without_a_table_entry_is_found() -> None:
    """S17: references come from block tables and pins, from nothing else."""
    frame = f.with_block(f.frame(), 1, ref_cnt=2)
    assert broken(frame) == {"ref_cnt = table entries + pins"}
    assert broken(f.with_block(frame, 1, pins=("copy",))) == set()


def test_an_owner_that_stands_in_no_table_is_found() -> None:
    owners = (BlockOwner("A", 0, 1), BlockOwner("A", 0, 7))
    assert "owners = block table entries" in broken(f.with_block(f.frame(), 2, owners=owners))


def test_hash_map_and_block_hashes_must_agree_both_ways() -> None:
    """R1.10, R1.12."""
    assert "hash map and block hashes agree" in broken(f.frame(hash_map=()))
    assert "hash map and block hashes agree" in broken(f.frame(hash_map=((f.KEY, (1, 3)),)))
    assert "hash map and block hashes agree" in broken(f.frame(hash_map=((f.KEY, (1, 77)),)))


def test_a_hashed_block_that_is_not_full_is_found_except_while_its_kv_is_pending() -> None:
    """R3.6 and S9: hashes are registered before the forward pass, and only until it has run may slots be missing."""
    half = f.with_block(f.frame(), 1, token_ids=(10, 11, None, None), num_filled=2)
    assert "only full blocks are hashed" in broken(half)
    assert broken(msgspec.structs.replace(half, op="schedule")) == set()


def test_overwriting_a_shared_slot_is_found() -> None:
    """Copy-on-write exists so that this never happens: two requests hold block 1, A writes its slot 0 again."""
    before = f.with_block(f.frame(), 1, ref_cnt=2, pins=("B",))
    after = f.frame(f.write([4], [99]), seq=1)
    assert "nothing shared is overwritten" in broken(after, before)


def test_writing_into_a_foreign_block_is_found() -> None:
    """R8.4: slots come from the request's own row."""
    assert "a request writes only its own blocks" in broken(f.frame(f.write([12], [99]), seq=1), f.frame())


def test_writing_outside_the_pool_is_found() -> None:
    assert "writes stay inside the pool" in broken(f.frame(f.write([16], [99]), seq=1), f.frame())
    assert "writes stay inside the pool" in broken(f.frame(f.write([-1], [99]), seq=1), f.frame())


def test_writing_the_next_free_slot_of_an_own_block_is_fine() -> None:
    assert broken(f.frame(f.write([10], [16]), seq=1), f.frame()) == set()


def test_the_error_says_frame_invariant_and_block() -> None:
    violations = check_integrity(f.frame(free_queue=()))
    with pytest.raises(IntegrityError, match=r"frame 7 breaks “queued iff ref_cnt is 0”: block 3 is not in the free queue with ref_cnt 0"):
        raise IntegrityError(7, violations)
