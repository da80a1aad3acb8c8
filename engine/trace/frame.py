"""A frame: the event that just happened and the whole logical state after it.

Self-contained and immutable: no tensor, no clock, no engine object. Frames share the parts that did not change (an unchanged `BlockState` is the
same object in neighbouring frames), which the codec and the stage's payload use to stay small. The long sequences of a recorded frame are
`SharedSequence`s, which tell in which places two of them differ; a frame made by hand may have tuples there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.trace.events import AnyEvent

TRACE_VERSION = 4
"""Goes up whenever events or states say more than before, so that the checks of today never judge a file by what it could not say."""


class BlockOwner(msgspec.Struct, frozen=True):
    """One entry of one block table that names the block."""

    request_id: str
    group_id: int
    logical_index: int


class BlockState(msgspec.Struct, frozen=True):
    """One physical block.

    `block_hashes`: keys it is registered under, primary first, each ``<hex digest>:<group id>``; `num_hash_tokens`: prefix length of the primary key.
    `token_ids`: per slot the token whose key and value lie there, None where nothing valid does; `num_filled` counts the others. There are as many slots
    as the block size of the KV-cache group that took the block last. `owners`: by group, then by arrival of the request, then by logical index.
    `pins`: who holds references that stand in no block table (a scenario that prepares the pool, a pending copy). ref_cnt = owners + pins.
    `num_state_tokens`: a block of recurrent states has no slots but one state, that after so many tokens of its request (None: none, or not such a block).
    """

    block_id: int
    ref_cnt: int
    is_null: bool
    block_hashes: tuple[str, ...]
    num_hash_tokens: int | None
    num_filled: int
    token_ids: tuple[int | None, ...]
    owners: tuple[BlockOwner, ...]
    pins: tuple[str, ...] = ()
    num_state_tokens: int | None = None


class RequestState(msgspec.Struct, frozen=True):
    """One request. `status` is the name of vLLM's RequestStatus.

    `token_ids`: prompt then outputs. `block_ids`: block table per KV-cache group (0 = null block). `block_hashes`: hex digests of its full hash blocks.
    `num_cached_block`: caching frontier per group, None before the first caching (R3.6). `forced`: positions whose token the scenario dictated.

    The paper's engine has one such state per sequence: `sequence_group` is the id of the request that it belongs to (None: the request is its only sequence),
    `parent_id` the sequence it was forked from, `cpu_block_ids` its block table while it is swapped out, `cumulative_logprob` the sum of the natural logarithms
    of its outputs' probabilities (None where nothing counts them).
    """

    request_id: str
    status: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    block_hashes: tuple[str, ...]
    num_cached_block: tuple[int | None, ...]
    num_preemptions: int = 0
    forced: tuple[int, ...] = ()
    sequence_group: str | None = None
    parent_id: str | None = None
    cpu_block_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None


class WorkerRow(msgspec.Struct, frozen=True):
    """One row of the worker's block table, per group. It may differ from the manager's table (R8.3).

    `stale_block_ids`: per group what stands in the row behind its length, left by an earlier occupant; () where that is nothing in any group (R8.2).
    """

    row: int
    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    stale_block_ids: tuple[tuple[int, ...], ...] = ()


class Counters(msgspec.Struct, frozen=True):
    """Totals since the run began, except the budget, which is this step's."""

    token_budget_left: int = 0
    num_hit_tokens: int = 0
    num_queried_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0


class Frame(msgspec.Struct, frozen=True):
    """One moment of a run.

    `seq` counts frames from 0, `step` engine steps (0 before the first), `op_index` the operations (several frames may share one); `op` names the
    operation (``prepare``, ``add_request A``, ``schedule``, ``execute_model``, ``update_from_output``). `free_queue`: block ids, head first. `requests`: all
    that ever arrived, in order of arrival.
    `hash_map`: the prefix cache in order of insertion, key -> block ids. `cpu_blocks`, `cpu_free_queue`, `swapped`: the paper's swap space, which block ids are
    free in it, and the sequence groups that lie there; empty in V1, which does not swap. Of the paper's engine `requests` are the sequences, in order of birth
    over all requests; `running` names sequences, in the order in which they are served, `waiting` and `swapped` name requests. `slot_mapping`: of the batch
    that the worker prepared last, int per scheduled token.
    """

    seq: int
    step: int
    op: str
    op_index: int
    event: AnyEvent
    blocks: Sequence[BlockState]
    free_queue: Sequence[int]
    hash_map: Sequence[tuple[str, tuple[int, ...]]]
    requests: Sequence[RequestState]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    rows: tuple[WorkerRow, ...]
    slot_mapping: tuple[int, ...]
    scheduled: dict[str, int]
    counters: Counters
    cpu_blocks: Sequence[BlockState] = ()
    cpu_free_queue: Sequence[int] = ()
    swapped: tuple[str, ...] = ()

    def request(self, request_id: str) -> RequestState | None:
        """The state of one request, or None while it has not arrived."""
        return next((r for r in self.requests if r.request_id == request_id), None)


class TraceHeader(msgspec.Struct, frozen=True):
    """What a run needs besides its frames: where it came from and how to read its token ids.

    `scenario`: the validated scenario as plain data. `config`: the engine's settings (num_blocks, block_size, ...). `model`: name, fingerprint and shape,
    or {"name": "none"} for a bookkeeping-only run. `backend`: name and reason of the kernel backend. `vocabulary`: token id -> text, for every id that occurs.
    """

    scenario: dict[str, Any]
    config: dict[str, Any]
    model: dict[str, Any]
    backend: dict[str, Any]
    versions: dict[str, str]
    seed: int
    vocabulary: dict[int, str]


class Trace(msgspec.Struct):
    """A recorded run. `complete` is False while it can still go on, and for ever when the recorder filled up or the engine failed."""

    header: TraceHeader
    frames: list[Frame]
    complete: bool = False
