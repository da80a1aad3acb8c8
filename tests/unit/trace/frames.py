"""Small sound frames made by hand, for tests that then break one thing."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.trace.events import AnyEvent, Cause, CauseKind, KVWritten, StepStarted
from engine.trace.frame import BlockOwner, BlockState, Counters, Frame, RequestState, Trace, TraceHeader

BLOCK_SIZE = 4
KEY = "ab" * 32 + ":0"
CAUSE = Cause(CauseKind.NEXT_STEP)


def block(block_id: int, **changes: Any) -> BlockState:
    """A free block without a hash; `changes` replace fields."""
    token_ids = changes.pop("token_ids", (None,) * BLOCK_SIZE)
    fields: dict[str, Any] = {
        "block_id": block_id, "ref_cnt": 0, "is_null": block_id == 0, "block_hashes": (), "num_hash_tokens": None,
        "num_filled": sum(t is not None for t in token_ids), "token_ids": token_ids, "owners": (),
    }  # fmt: skip
    return BlockState(**{**fields, **changes})


def frame(event: AnyEvent | None = None, **changes: Any) -> Frame:
    """Four blocks: null; 1 full and hashed, owned by A; 2 half filled, owned by A; 3 free."""
    blocks = (
        block(0),
        block(1, ref_cnt=1, block_hashes=(KEY,), num_hash_tokens=4, token_ids=(10, 11, 12, 13), owners=(BlockOwner("A", 0, 0),)),
        block(2, ref_cnt=1, token_ids=(14, 15, None, None), owners=(BlockOwner("A", 0, 1),)),
        block(3),
    )
    request = RequestState("A", "RUNNING", 6, (10, 11, 12, 13, 14, 15), 6, ((1, 2),), ("ab" * 32,), (1,))
    fields: dict[str, Any] = {
        "seq": 0, "step": 1, "op": "update_from_output", "op_index": 1, "event": event or StepStarted(cause=CAUSE, token_budget=64),
        "blocks": blocks, "free_queue": (3,), "hash_map": ((KEY, (1,)),), "requests": (request,), "running": ("A",), "waiting": (), "rows": (),
        "slot_mapping": (), "scheduled": {}, "counters": Counters(),
    }  # fmt: skip
    return Frame(**{**fields, **changes})


def with_block(base: Frame, block_id: int, **changes: Any) -> Frame:
    """`base` with some fields of one block replaced."""
    blocks = list(base.blocks)
    blocks[block_id] = msgspec.structs.replace(blocks[block_id], **changes)
    return msgspec.structs.replace(base, blocks=tuple(blocks))


def write(slots: list[int], token_ids: list[int], request_id: str = "A") -> KVWritten:
    """A write of the worker."""
    return KVWritten(cause=Cause(CauseKind.SLOT_MAPPING), request_id=request_id, slots=slots, token_ids=token_ids, num_layers=1, backend="torch")


def trace(*frames: Frame) -> Trace:
    """A complete trace of these frames."""
    header = TraceHeader({"id": "hand"}, {"block_size": BLOCK_SIZE}, {"name": "none"}, {"name": "none"}, {"python": "3"}, 0, {10: "Four", 11: "score"})
    return Trace(header, list(frames), True)
