"""The invariants that hold in every frame, whatever the scenario: the ledger that is always on.

`check_integrity` looks at one frame (and the one before it) and at nothing else, so it checks imported traces exactly as it checks live ones.
It is deliberately independent of the engine: it recounts from the block tables what the engine keeps in counters.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from engine.errors import EngineError
from engine.trace.events import KVWritten
from engine.trace.frame import Frame

_PENDING_OPS = ("schedule", "execute_model")
"""Operations during which a hashed block may still wait for its keys and values: hashes are registered before the forward pass (R7.7, S9)."""


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant: its name, the sentence to show, and the block it is about (None: the pool as a whole)."""

    invariant: str
    message: str
    block_id: int | None = None


class IntegrityError(EngineError):
    """A frame broke an invariant; `violations` has all of them. Raised by the recorder, so that no run goes on past a broken state."""

    def __init__(self, seq: int, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__(f"frame {seq} breaks “{violations[0].invariant}”: {violations[0].message}")


def check_integrity(frame: Frame, previous: Frame | None = None) -> list[Violation]:
    """All violations in `frame`, an empty list when it is sound. `previous` is needed for the rules about writing (None: they are not checked).

    The invariants, in the order of checking: every block is free, used or null; a block is queued iff ref_cnt is 0 and it is not the null block
    (R1.2, R1.6, R1.7); ref_cnt = block table entries + pins (S17); hash map and block hashes agree in both directions (R1.10, R1.12); only full
    blocks are hashed (R1.11, R3.6); nothing shared is overwritten and every write goes into a block of its own request (R8.4). Mutates nothing.
    """
    found: list[Violation] = []
    _check_partition(frame, found)
    _check_ref_counts(frame, found)
    _check_hash_map(frame, found)
    _check_full_blocks(frame, found)
    if previous is not None:
        _check_writes(frame, previous, found)
    return found


def _check_partition(frame: Frame, found: list[Violation]) -> None:
    queued = Counter(frame.free_queue)
    num_used = 0
    for block in frame.blocks:
        times = queued.pop(block.block_id, 0)
        if times > 1:
            found.append(Violation("each block once in the free queue", f"block {block.block_id} stands in the free queue {times} times", block.block_id))
        if block.is_null:
            if times:
                found.append(Violation("null block never free", f"the null block {block.block_id} stands in the free queue", block.block_id))
        elif bool(times) != (block.ref_cnt == 0):
            state = "in" if times else "not in"
            text = f"block {block.block_id} is {state} the free queue with ref_cnt {block.ref_cnt}"
            found.append(Violation("queued iff ref_cnt is 0", text, block.block_id))
        elif not times:
            num_used += 1
    for block_id in queued:
        found.append(Violation("free + used + null = all", f"the free queue names block {block_id}, which the pool does not have", block_id))
    num_null = sum(b.is_null for b in frame.blocks)
    if len(frame.free_queue) + num_used + num_null != len(frame.blocks):
        text = f"{len(frame.free_queue)} free + {num_used} used + {num_null} null is not {len(frame.blocks)}"
        found.append(Violation("free + used + null = all", text))


def _check_ref_counts(frame: Frame, found: list[Violation]) -> None:
    entries: Counter[int] = Counter()
    null_ids = {b.block_id for b in frame.blocks if b.is_null}
    for request in frame.requests:
        for table in request.block_ids:
            entries.update(block_id for block_id in table if block_id not in null_ids)
    for block in frame.blocks:
        if block.is_null:
            continue
        if entries[block.block_id] != len(block.owners):
            text = f"{entries[block.block_id]} block table entries name block {block.block_id}, but it lists {len(block.owners)} owners"
            found.append(Violation("owners = block table entries", text, block.block_id))
        if block.ref_cnt != entries[block.block_id] + len(block.pins):
            text = f"block {block.block_id} has ref_cnt {block.ref_cnt}, but {entries[block.block_id]} block table entries and {len(block.pins)} pins"
            found.append(Violation("ref_cnt = table entries + pins", text, block.block_id))


def _check_hash_map(frame: Frame, found: list[Violation]) -> None:
    keys_of: dict[int, set[str]] = {}
    for key, block_ids in frame.hash_map:
        for block_id in block_ids:
            keys_of.setdefault(block_id, set()).add(key)
    for block in frame.blocks:
        mapped = keys_of.pop(block.block_id, set())
        if mapped != set(block.block_hashes):
            text = f"block {block.block_id} bears {len(block.block_hashes)} hash keys, but the prefix cache maps {len(mapped)} to it, not the same ones"
            found.append(Violation("hash map and block hashes agree", text, block.block_id))
        if block.is_null and block.block_hashes:
            found.append(Violation("null block never hashed", "the null block bears a hash", block.block_id))
    for block_id in keys_of:
        found.append(Violation("hash map and block hashes agree", f"the prefix cache names block {block_id}, which the pool does not have", block_id))


def _check_full_blocks(frame: Frame, found: list[Violation]) -> None:
    requests = {r.request_id: r for r in frame.requests}
    pending_allowed = frame.op.startswith(_PENDING_OPS)
    for block in frame.blocks:
        if not block.block_hashes or block.num_hash_tokens is None:
            continue
        block_size = len(block.token_ids)
        if block.num_hash_tokens % block_size:
            continue  # a sub-block entry (R6.3) covers less than the block on purpose
        if block.num_filled < block_size and not (pending_allowed and block.owners):
            text = f"block {block.block_id} is hashed with {block.num_filled} of {block_size} slots written"
            found.append(Violation("only full blocks are hashed", text, block.block_id))
        for owner in block.owners:
            if (owner.logical_index + 1) * block_size > len(requests[owner.request_id].token_ids):
                text = f"block {block.block_id} is hashed, but {owner.request_id} has no tokens for all its slots"
                found.append(Violation("only full blocks are hashed", text, block.block_id))


def _check_writes(frame: Frame, previous: Frame, found: list[Violation]) -> None:
    event = frame.event
    if not isinstance(event, KVWritten):
        return
    for slot in event.slots:
        block_size = len(frame.blocks[0].token_ids)
        if not 0 <= slot < len(frame.blocks) * block_size:
            found.append(Violation("writes stay inside the pool", f"{event.request_id} writes slot {slot}, which the pool does not have"))
            continue
        before = previous.blocks[slot // block_size]
        if before.is_null or all(owner.request_id != event.request_id for owner in before.owners):
            text = f"{event.request_id} writes slot {slot} of block {before.block_id}, which is not in its block table"
            found.append(Violation("a request writes only its own blocks", text, before.block_id))
        elif before.ref_cnt > 1 and before.token_ids[slot % block_size] is not None:
            text = f"{event.request_id} overwrites slot {slot} of block {before.block_id}, which {before.ref_cnt} references share"
            found.append(Violation("nothing shared is overwritten", text, before.block_id))
