"""The invariants that hold in every frame, whatever the scenario: the ledger that is always on.

`check_integrity` looks at one frame (and the one before it) and at nothing else, so it checks imported traces exactly as it checks live ones.
It is deliberately independent of the engine: it recounts from the block tables what the engine keeps in counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from engine.errors import EngineError
from engine.trace.events import KVWritten, StateWritten
from engine.trace.frame import BlockState, Frame, RequestState
from engine.trace.state_check import check_state_written
from engine.trace.violation import Violation as Violation
from engine.trace.witness_check import check_witness

_PENDING_OPS = ("schedule", "execute_model")
"""Operations during which a hashed block may still wait for its keys and values: hashes are registered before the forward pass (R7.7, S9)."""


ABOUT_CONTENTS = frozenset({"only full blocks are hashed", "a hashed state is the one its key names"})
"""Invariants about what lies in hashed blocks. vLLM 0.27.0 breaks them where it registers tokens that nobody computes after all."""


class IntegrityError(EngineError):
    """A frame broke an invariant; `violations` has all of them. Raised by the recorder, so that no run goes on past a broken state."""

    def __init__(self, seq: int, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__(f"frame {seq} breaks “{violations[0].invariant}”: {violations[0].message}")


class Recount:
    """What a frame says about its blocks elsewhere than in the blocks themselves.

    `queued`: how often the free queue names a block; `entries`: how many block table entries do, null blocks apart; `keys`: under which keys the prefix
    cache has it. Blocks that nothing names are missing.
    """

    @classmethod
    def of_swap_space(cls, frame: Frame) -> Recount:
        """The same about the blocks of the paper's swap space, by the tables that sequences have there."""
        made = cls.__new__(cls)
        made.queued, made.null_ids, made.entries, made.keys = Counter(frame.cpu_free_queue), set(), Counter(), {}
        for request in frame.requests:
            made.entries.update(request.cpu_block_ids)
        return made

    def __init__(self, frame: Frame) -> None:
        self.queued: Counter[int] = Counter(frame.free_queue)
        self.null_ids = {block.block_id for block in frame.blocks if block.is_null}
        self.entries: Counter[int] = Counter()
        for request in frame.requests:
            for table in request.block_ids:
                self.entries.update(table)
        for block_id in self.null_ids:
            del self.entries[block_id]
        self.keys: dict[int, set[str]] = {}
        for key, block_ids in frame.hash_map:
            for block_id in block_ids:
                self.keys.setdefault(block_id, set()).add(key)


def check_integrity(frame: Frame, previous: Frame | None = None) -> list[Violation]:
    """All violations in `frame`, an empty list when it is sound. `previous` is needed for the rules about writing (None: they are not checked).

    The invariants: every block is free, used or null; a block is queued iff ref_cnt is 0 and it is not the null block (R1.2, R1.6, R1.7); ref_cnt =
    block table entries + pins (S17); hash map and block hashes agree in both directions (R1.10, R1.12); only what is written is hashed, except that
    this step may still write it (R1.11, R3.6, R6.3, S9); nothing shared is overwritten and every write goes into a block of its own request (R8.4); a
    recurrent state grows out of its own request's prefix (`engine.trace.state_check`); and what the kernels' programs were seen to read and write is what
    the block tables allow (`engine.trace.witness_check`). The paper's swap space (section 4.5) is counted in the same way, and a sequence lies either in it
    or on the GPU. O(blocks + table entries). Mutates nothing.
    """
    recount = Recount(frame)
    requests = {request.request_id: request for request in frame.requests}
    found: list[Violation] = []
    num_used = num_null = 0
    for block in frame.blocks:
        if not _is_plainly_free(block, recount):
            found.extend(check_block(block, recount, requests, frame.op))
        num_null += block.is_null
        num_used += not block.is_null and block.ref_cnt != 0
    found.extend(check_pool(frame, num_used, num_null))
    found.extend(check_names(recount, len(frame.blocks), [*recount.queued], [*recount.keys]))
    found.extend(check_swap_space(frame))
    found.extend(check_witness(frame))
    if previous is not None:
        found.extend(check_writes(frame, previous))
    return found


def _is_plainly_free(block: BlockState, recount: Recount) -> bool:
    """Nothing but queued: most blocks of most frames, and nothing to check."""
    if block.ref_cnt or block.is_null or block.block_hashes or block.owners or block.pins:
        return False
    block_id = block.block_id
    return recount.queued.get(block_id) == 1 and block_id not in recount.entries and block_id not in recount.keys


def check_pool(frame: Frame, num_used: int, num_null: int) -> Iterator[Violation]:
    """The sum over the whole pool, O(1)."""
    if len(frame.free_queue) + num_used + num_null != len(frame.blocks):
        text = f"{len(frame.free_queue)} free + {num_used} used + {num_null} null is not {len(frame.blocks)}"
        yield Violation("free + used + null = all", text)


def check_names(recount: Recount, num_blocks: int, queued: Sequence[int], keyed: Sequence[int]) -> Iterator[Violation]:
    """Whether these ids, which the free queue and the prefix cache name, are blocks of the pool."""
    for block_id in queued:
        if not 0 <= block_id < num_blocks and recount.queued[block_id]:
            yield Violation("free + used + null = all", f"the free queue names block {block_id}, which the pool does not have", block_id)
    for block_id in keyed:
        if not 0 <= block_id < num_blocks and recount.keys.get(block_id):
            yield Violation("hash map and block hashes agree", f"the prefix cache names block {block_id}, which the pool does not have", block_id)


def check_swap_space(frame: Frame) -> Iterator[Violation]:
    """Everything that is said about the swap space, O(its blocks); nothing where there is none."""
    if not frame.cpu_blocks and not frame.cpu_free_queue:
        return
    recount = Recount.of_swap_space(frame)
    found = [v for block in frame.cpu_blocks for v in check_block(block, recount, {}, frame.op)]
    found += check_names(recount, len(frame.cpu_blocks), [*recount.queued], [])
    num_used = sum(block.ref_cnt != 0 for block in frame.cpu_blocks)
    if len(frame.cpu_free_queue) + num_used != len(frame.cpu_blocks):
        text = f"{len(frame.cpu_free_queue)} free + {num_used} used is not {len(frame.cpu_blocks)}"
        found.append(Violation("free + used + null = all", text))
    for violation in found:
        yield msgspec.structs.replace(violation, message=f"in the swap space, {violation.message}")
    for request in frame.requests:
        if request.cpu_block_ids and any(request.block_ids):
            text = f"{request.request_id} has blocks on the GPU and in the swap space"
            yield Violation("a sequence lies on the GPU or in the swap space", text)


def check_block(block: BlockState, recount: Recount, requests: dict[str, RequestState], op: str) -> Iterator[Violation]:
    """Everything that is said about one block, O(its owners and keys)."""
    block_id = block.block_id
    times = recount.queued.get(block_id, 0)
    if times > 1:
        yield Violation("each block once in the free queue", f"block {block_id} stands in the free queue {times} times", block_id)
    keys = recount.keys.get(block_id, ())
    if len(keys) != len(block.block_hashes) or any(key not in keys for key in block.block_hashes):
        text = f"block {block_id} bears {len(block.block_hashes)} hash keys, but the prefix cache maps {len(keys)} to it, not the same ones"
        yield Violation("hash map and block hashes agree", text, block_id)
    if block.is_null:
        if times:
            yield Violation("null block never free", f"the null block {block_id} stands in the free queue", block_id)
        if block.block_hashes:
            yield Violation("null block never hashed", "the null block bears a hash", block_id)
        return
    if bool(times) != (block.ref_cnt == 0):
        text = f"block {block_id} is {'in' if times else 'not in'} the free queue with ref_cnt {block.ref_cnt}"
        yield Violation("queued iff ref_cnt is 0", text, block_id)
    entries = recount.entries.get(block_id, 0)
    if entries != len(block.owners):
        text = f"{entries} block table entries name block {block_id}, but it lists {len(block.owners)} owners"
        yield Violation("owners = block table entries", text, block_id)
    if block.ref_cnt != entries + len(block.pins):
        text = f"block {block_id} has ref_cnt {block.ref_cnt}, but {entries} block table entries and {len(block.pins)} pins"
        yield Violation("ref_cnt = table entries + pins", text, block_id)
    if block.block_hashes and block.num_hash_tokens is not None:
        yield from _check_hashed(block, block.num_hash_tokens, requests, op)


def is_pending(block: BlockState) -> bool:
    """Whether a hashed block does not yet hold what its primary key promises."""
    if not block.block_hashes or block.num_hash_tokens is None:
        return False
    block_size = len(block.token_ids)
    if not block_size:
        return block.num_state_tokens != block.num_hash_tokens
    return None in block.token_ids[: block.num_hash_tokens % block_size or block_size]


def _check_hashed(block: BlockState, num_hash_tokens: int, requests: dict[str, RequestState], op: str) -> Iterator[Violation]:
    block_size = len(block.token_ids)
    if not block_size:  # a recurrent state; the queued copy of one has neither owner nor pin until the worker makes it (R6.5, R6.6)
        if is_pending(block) and not op.startswith(_PENDING_OPS):
            text = f"block {block.block_id} is hashed as the state after {num_hash_tokens} tokens, but has {_state_text(block)}"
            yield Violation("a hashed state is the one its key names", text, block.block_id)
        return
    num_covered = num_hash_tokens % block_size or block_size  # an entry may end inside the block (R6.3)
    if is_pending(block) and not (block.owners and op.startswith(_PENDING_OPS)):
        num_written = sum(t is not None for t in block.token_ids[:num_covered])
        text = f"block {block.block_id} is hashed with {num_written} of {num_covered} slots written"
        yield Violation("only full blocks are hashed", text, block.block_id)
    if len(block.block_hashes) > 1:
        return  # an owner may have come by one of the shorter keys
    for owner in block.owners:
        request = requests.get(owner.request_id)
        if request is not None and owner.logical_index * block_size + num_covered > len(request.token_ids):
            text = f"block {block.block_id} is hashed, but {owner.request_id} has no tokens for all its slots"
            yield Violation("only full blocks are hashed", text, block.block_id)


def _state_text(block: BlockState) -> str:
    return "none" if block.num_state_tokens is None else f"that after {block.num_state_tokens}"


def check_writes(frame: Frame, previous: Frame) -> Iterator[Violation]:
    """Whether what the frame's event wrote belongs to its request, and to nobody else."""
    event = frame.event
    if isinstance(event, KVWritten):
        yield from _check_slots(event, frame, previous)
    elif isinstance(event, StateWritten):
        yield from check_state_written(event, frame, previous)


def _check_slots(event: KVWritten, frame: Frame, previous: Frame) -> Iterator[Violation]:
    block_size = _block_size(event, frame)
    for slot, token_id in zip(event.slots, event.token_ids, strict=True):
        if not 0 <= slot < len(frame.blocks) * block_size:
            yield Violation("writes stay inside the pool", f"{event.request_id} writes slot {slot}, which the pool does not have")
            continue
        before = previous.blocks[slot // block_size]
        if not _owned(before, event.request_id, event.group_id):
            text = f"{event.request_id} writes slot {slot} of block {before.block_id}, which is not in its block table"
            yield Violation("a request writes only its own blocks", text, before.block_id)
        elif before.ref_cnt > 1 and slot % block_size < len(before.token_ids) and before.token_ids[slot % block_size] is not None:
            text = f"{event.request_id} overwrites slot {slot} of block {before.block_id}, which {before.ref_cnt} references share"
            yield Violation("nothing shared is overwritten", text, before.block_id)
        elif before.ref_cnt > 1:
            yield from _check_forks(slot, token_id, before, frame)


def _check_forks(slot: int, token_id: int, before: BlockState, frame: Frame) -> Iterator[Violation]:
    """A fork shares its parent's partial last block (section 4.4): what is written there must be a token that all who share the block have at that place."""
    requests = [(owner, frame.request(owner.request_id)) for owner in before.owners]
    if not any(request is not None and request.parent_id is not None for _, request in requests):
        return  # found by hash: they have the same tokens (R1.10)
    block_size = len(before.token_ids)
    for owner, request in requests:
        position = owner.logical_index * block_size + slot % block_size
        if request is not None and request.token_ids[position : position + 1] != (token_id,):
            text = f"slot {slot} of block {before.block_id} is written without a copy, but {owner.request_id} shares the block and has another token there"
            yield Violation("nothing shared is overwritten", text, before.block_id)


def _block_size(event: KVWritten, frame: Frame) -> int:
    """Tokens per block of the group that was written: that of the blocks which the request has there."""
    request = frame.request(event.request_id) if event.request_id is not None else None
    if request is not None:
        for block_id in request.block_ids[event.group_id or 0]:
            if 0 <= block_id < len(frame.blocks) and not frame.blocks[block_id].is_null:
                return len(frame.blocks[block_id].token_ids) or 1
    return len(frame.blocks[0].token_ids) or 1


def _owned(block: BlockState, request_id: str | None, group_id: int | None) -> bool:
    return not block.is_null and any(owner.request_id == request_id and owner.group_id == (group_id or 0) for owner in block.owners)
