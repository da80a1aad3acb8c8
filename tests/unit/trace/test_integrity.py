"""Every invariant is broken once on purpose: the ledger must name the right one, and be silent on a sound frame."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.trace.frame import BlockOwner, Frame, RequestState
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


def test_an_entry_that_ends_inside_the_block_needs_only_what_it_covers() -> None:
    """R6.3: A@6 is registered for block 2, of which two slots are written."""
    frame = f.frame(hash_map=((f.KEY, (1,)), ("cd:0", (2,))))
    assert broken(f.with_block(frame, 2, block_hashes=("cd:0",), num_hash_tokens=6)) == set()
    assert broken(f.with_block(frame, 2, block_hashes=("cd:0",), num_hash_tokens=7)) == {"only full blocks are hashed"}


def hybrid(**state: Any) -> Frame:
    """Block 3 has A's recurrent state after 4 tokens, hashed as that, in a second group whose table begins with a null block."""
    fields = {"ref_cnt": 1, "token_ids": (), "num_filled": 0, "owners": (BlockOwner("A", 1, 1),), "num_state_tokens": 4, "block_hashes": ("ab:1",)}
    frame = f.with_block(f.frame(free_queue=()), 3, **{**fields, "num_hash_tokens": 4, **state})
    request = RequestState("A", "RUNNING", 6, (10, 11, 12, 13, 14, 15), 6, ((1, 2), (0, 3)), ("ab" * 32,), (1, 2))
    return msgspec.structs.replace(frame, requests=(request,), hash_map=((f.KEY, (1,)), ("ab:1", (3,))))


def test_null_blocks_in_tables_count_for_nothing() -> None:
    """R1.2, R3.2."""
    assert broken(hybrid()) == set()


def test_a_hashed_state_is_the_one_its_key_names() -> None:
    """R3.40, R6.5: overwriting a registered state would offer another prefix's state to the next hit. Until the model has run it may be missing (R3.41)."""
    for num_state_tokens in (None, 5):
        frame = hybrid(num_state_tokens=num_state_tokens)
        assert broken(frame) == {"a hashed state is the one its key names"}
        assert broken(msgspec.structs.replace(frame, op="execute_model")) == set()


def test_a_queued_copy_holds_both_ends() -> None:
    """R6.6: the copy of a state has a key and references before anybody owns it."""
    unowned = {"owners": (), "num_state_tokens": None}
    frame = hybrid(**unowned, pins=("copy",))
    request = msgspec.structs.replace(frame.requests[0], block_ids=((1, 2), (0, 0)))
    frame = msgspec.structs.replace(frame, requests=(request,), op="schedule")
    assert broken(frame) == set()
    assert "ref_cnt = table entries + pins" in broken(f.with_block(frame, 3, pins=()))


def test_slots_of_a_group_are_counted_in_its_own_block_size() -> None:
    """R8.4: A's second group has 2 tokens per block, so its block 3 is slots 6 and 7."""
    attention = {"token_ids": (None, None), "num_state_tokens": None, "block_hashes": (), "num_hash_tokens": None}
    before = msgspec.structs.replace(hybrid(**attention), hash_map=((f.KEY, (1,)),))
    for slot, expected in ((7, set()), (8, {"writes stay inside the pool"}), (2, {"a request writes only its own blocks"})):
        event = msgspec.structs.replace(f.write([slot], [14]), group_id=1)
        assert broken(msgspec.structs.replace(before, event=event, seq=1), before) == expected


def test_the_error_says_frame_invariant_and_block() -> None:
    violations = check_integrity(f.frame(free_queue=()))
    with pytest.raises(IntegrityError, match=r"frame 7 breaks “queued iff ref_cnt is 0”: block 3 is not in the free queue with ref_cnt 0"):
        raise IntegrityError(7, violations)
