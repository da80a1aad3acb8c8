"""Recurrent states: a request reads the one of its own prefix and writes where nobody else looks. Every rule is broken once on purpose (A45, A46, A50)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.trace.events import BlocksCopied, StateWritten
from engine.trace.frame import BlockOwner, Frame, RequestState
from engine.trace.integrity import check_integrity
from engine.trace.slot_ledger import SlotLedger
from engine.trace.state_check import NOTHING_SHARED, NULL_BLOCK, OWN_BLOCKS, OWN_PREFIX
from tests.unit.trace import frames as f

STATE: dict[str, Any] = {"ref_cnt": 1, "token_ids": (), "num_filled": 0}


def before(**source: Any) -> Frame:
    """A has computed 4 tokens and this step computes two more (R7.1: its counter says 6). The state after 4 tokens is in block 2, block 3 waits for the next
    one; its table in the group of states is [2, 3]. Block 1 is B's, with B's state after 4 tokens."""
    frame = f.frame(free_queue=(), hash_map=(), scheduled={"A": 2}, op="execute_model")
    frame = f.with_block(frame, 1, **STATE, owners=(BlockOwner("B", 1, 0),), num_state_tokens=4, block_hashes=(), num_hash_tokens=None)
    frame = f.with_block(frame, 2, **{**STATE, "owners": (BlockOwner("A", 1, 0),), "num_state_tokens": 4, **source})
    frame = f.with_block(frame, 3, **STATE, owners=(BlockOwner("A", 1, 1),))
    requests = (
        RequestState("A", "RUNNING", 6, (10, 11, 12, 13, 14, 15), 6, ((), (2, 3)), (), (None, None)),
        RequestState("B", "RUNNING", 4, (20, 21, 22, 23), 4, ((), (1,)), (), (None, None)),
    )
    return msgspec.structs.replace(frame, requests=requests)


def written(**changes: Any) -> StateWritten:
    fields = {"source_block_id": 2, "num_source_tokens": 4, "block_id": 3, "num_tokens": 6, **changes}
    return StateWritten(cause=f.CAUSE, request_id="A", group_id=1, **fields)


def found(event: StateWritten, previous: Frame | None = None) -> set[str]:
    """What is wrong with the frame after `event`; the ledger's part of it is taken over."""
    base = previous or before()
    after = base if event.block_id >= len(base.blocks) else f.with_block(base, event.block_id, num_state_tokens=event.num_tokens)
    return {v.invariant for v in check_integrity(msgspec.structs.replace(after, event=event, seq=1), base)}


def test_the_next_state_of_a_request_grows_out_of_its_last_one() -> None:
    """R3.43: read from column (4-1)//4, written to column ceil(6/4)-1."""
    assert found(written()) == set()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"source_block_id": 1}, OWN_PREFIX),  # A45: a wrong column's block, here another request's state after as many tokens
        ({"source_block_id": 3}, OWN_PREFIX),  # A45: an own block without a state
        ({"source_block_id": 0}, NULL_BLOCK),  # A46
        ({"source_block_id": 9}, OWN_PREFIX),
        ({"source_block_id": None}, OWN_PREFIX),
        ({"source_block_id": None, "num_source_tokens": 0}, OWN_PREFIX),
        ({"num_source_tokens": 3}, OWN_PREFIX),
        ({"num_tokens": 4}, OWN_PREFIX),
        ({"num_tokens": 7}, OWN_PREFIX),
        ({"block_id": 0}, NULL_BLOCK),  # A46
        ({"block_id": 1}, OWN_BLOCKS),
        ({"block_id": 9}, "writes stay inside the pool"),
    ],
    ids=str,
)
def test_a_state_that_is_not_the_requests_own_is_found(changes: dict[str, Any], name: str) -> None:
    assert name in found(written(**changes))


def test_a_source_that_holds_another_prefix_is_found() -> None:
    for num_state_tokens in (None, 3, 5):
        assert found(written(), before(num_state_tokens=num_state_tokens)) == {OWN_PREFIX}


def test_a_state_that_others_may_read_is_not_overwritten() -> None:
    shared = before(ref_cnt=2, pins=("copy",))
    assert found(written(block_id=2), shared) == {NOTHING_SHARED}
    assert found(written(block_id=2)) == set()  # its own alone: the running state moves on in place


def test_states_on_the_way_grow_out_of_one_another() -> None:
    """R3.42, mode ``all``: the state after 5 tokens is written, then the one after 6 grows out of it. Nobody else may begin in the middle of a step."""
    on_the_way = f.with_block(before(), 3, num_state_tokens=5)
    on_the_way = msgspec.structs.replace(on_the_way, event=written(num_tokens=5))
    last = written(source_block_id=3, num_source_tokens=5, block_id=3)
    assert found(last, on_the_way) == set()
    assert found(last, msgspec.structs.replace(on_the_way, event=written(num_tokens=5, block_id=2))) == {OWN_PREFIX}


def test_a_copy_takes_the_state_along_and_one_that_was_forgotten_is_found() -> None:
    """R6.4: the partial hit's state lies in block 1, the request's own copy is block 2. A50: without the copy there is no state to go on from."""
    ledger = SlotLedger(4, 4, [4, 0])
    ledger.apply(StateWritten(cause=f.CAUSE, request_id="B", group_id=1, block_id=1, num_tokens=4))
    assert found(written(), before(num_state_tokens=ledger.num_state_tokens.get(2))) == {OWN_PREFIX}
    ledger.apply(BlocksCopied(cause=f.CAUSE, source_block_ids=[1], destination_block_ids=[2]))
    assert found(written(), before(num_state_tokens=ledger.num_state_tokens.get(2))) == set()
