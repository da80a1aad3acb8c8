"""Makes small traces with several KV-cache groups by hand, for tests of what is drawn and said. No screen ever shows them; digests are made up.

It keeps the books of pool, tables and hashes and appends a frame per event; what happens, and in which order, is up to the caller.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from engine.trace import events as e
from engine.trace.events import AnyEvent, Cause, CauseKind
from engine.trace.frame import BlockOwner, BlockState, Counters, Frame, RequestState, Trace, TraceHeader, WorkerRow

TEXTS = [
    "Four",
    "score",
    "and",
    "seven",
    "years",
    "ago",
    "our",
    "fathers",
    "brought",
    "forth",
    "on",
    "this",
    "continent",
    "a",
    "new",
    "nation",
    "conceived",
    "in",
    "liberty",
]
VOCABULARY = {100 + i: text for i, text in enumerate(TEXTS)}
PROMPT = tuple(VOCABULARY)


class Made(msgspec.Struct):
    """A request as the maker keeps it."""

    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]
    cached: list[int | None]
    rows: list[list[int]]
    status: str = "WAITING"
    computed: int = 0


class TraceMaker:
    """`groups` as they stand in a header's config: kind, block_size and what the kind adds."""

    def __init__(self, num_blocks: int, groups: list[dict[str, Any]], hash_block_size: int, title: str) -> None:
        self.frames: list[Frame] = []
        self.groups, self.unit, self.num_blocks = groups, hash_block_size, num_blocks
        self.queue = list(range(1, num_blocks))
        self.made: dict[str, Made] = {}
        self.keys: dict[str, list[int]] = {}
        self.block_keys: dict[int, list[tuple[str, int]]] = {}
        self.content: dict[int, tuple[int | None, ...]] = {}
        self.states: dict[int, int] = {}
        self.pins: dict[int, list[str]] = {}
        self.step = 0
        self.scheduled: dict[str, int] = {}
        self._known: dict[int, BlockState] = {}
        config = {"num_blocks": num_blocks, "block_size": groups[0]["block_size"], "hash_block_size": hash_block_size, "kv_cache_groups": groups}
        self.header = TraceHeader({"id": "made", "title": title}, config, {"name": "none"}, {"name": "none"}, {}, 0, dict(VOCABULARY))
        started = Cause(CauseKind.SCENARIO)
        sizes = [g["block_size"] for g in groups]
        self.emit("start", e.TraceStarted(cause=started, num_blocks=num_blocks, block_size=sizes[0], group_block_sizes=sizes))

    def trace(self) -> Trace:
        return Trace(self.header, self.frames, True)

    def is_state(self, group_id: int) -> bool:
        return bool(self.groups[group_id]["kind"] == "mamba")

    def digest(self, request_id: str, num_tokens: int) -> str:
        return hashlib.sha256(repr(self.made[request_id].tokens[:num_tokens]).encode()).hexdigest()

    # ------------------------------------------------------------------ frames

    def emit(self, op: str, event: AnyEvent) -> None:
        last = self.frames[-1] if self.frames else None
        op_index = last.op_index + (op != last.op) if last else 0
        self.frames.append(
            Frame(
                len(self.frames), self.step, op, op_index, event, tuple(self._block(b) for b in range(self.num_blocks)), tuple(self.queue),
                tuple((key, tuple(ids)) for key, ids in self.keys.items()), tuple(self._request(i, m) for i, m in self.made.items()),
                tuple(i for i, m in self.made.items() if m.status == "RUNNING"), tuple(i for i, m in self.made.items() if m.status == "WAITING"),
                tuple(WorkerRow(n, i, tuple(map(tuple, m.rows))) for n, (i, m) in enumerate(self.made.items()) if any(m.rows)), (), dict(self.scheduled),
                Counters(),
            )
        )  # fmt: skip

    def _request(self, request_id: str, made: Made) -> RequestState:
        hashes = tuple(self.digest(request_id, n) for n in range(self.unit, len(made.tokens) + 1, self.unit))
        tables = tuple(map(tuple, made.tables))
        return RequestState(request_id, made.status, made.num_prompt, tuple(made.tokens), made.computed, tables, hashes, tuple(made.cached))

    def _block(self, block_id: int) -> BlockState:
        owners = tuple(BlockOwner(i, g, n) for i, m in self.made.items() for g, t in enumerate(m.tables) for n, b in enumerate(t) if b == block_id and block_id)
        keys = self.block_keys.get(block_id, [])
        slots = self.content.get(block_id, (None,) * self.groups[0]["block_size"])
        pins = tuple(self.pins.get(block_id, ()))
        filled = sum(t is not None for t in slots)
        state = BlockState(
            block_id, len(owners) + len(pins), block_id == 0, tuple(k for k, _ in keys), keys[0][1] if keys else None, filled, slots, owners, pins,
            self.states.get(block_id),
        )  # fmt: skip
        if self._known.get(block_id) != state:
            self._known[block_id] = state
        return self._known[block_id]

    # ------------------------------------------------------------------ what can happen

    def arrive(self, request_id: str, num_tokens: int) -> None:
        n = len(self.groups)
        self.made[request_id] = Made(list(PROMPT[:num_tokens]), num_tokens, [[] for _ in range(n)], [None] * n, [[] for _ in range(n)])
        hashes = num_tokens // self.unit
        cause = Cause(CauseKind.SCENARIO, {"what": "arrival"})
        self.emit(f"add_request {request_id}", e.RequestAdded(cause=cause, request_id=request_id, num_prompt_tokens=num_tokens, num_block_hashes=hashes))

    def begin_step(self, budget: int = 64) -> None:
        self.step += 1
        self.scheduled = {}
        self.emit("schedule", e.StepStarted(cause=Cause(CauseKind.NEXT_STEP, {"num_running": 0, "num_waiting": 1}), token_budget=budget))

    def take(self, request_id: str, group_id: int, block_ids: list[int], num_tokens: int) -> None:
        made = self.made[request_id]
        assert self.queue[: len(block_ids)] == block_ids
        held, free = len(made.tables[group_id]), len(self.queue)
        self._leave_queue(block_ids, group_id)
        made.tables[group_id] += block_ids
        facts: dict[str, Any] = {"num_tokens": num_tokens, "num_required": held + len(block_ids), "num_held": held, "num_free": free}
        cause = Cause(CauseKind.HEAD_OF_FREE_QUEUE, facts)
        self.emit("schedule", e.BlocksAllocated(cause=cause, request_id=request_id, group_id=group_id, block_ids=block_ids))

    def _leave_queue(self, block_ids: list[int], group_id: int) -> None:
        for block_id in block_ids:
            self.queue.remove(block_id)
            self.content[block_id] = () if self.is_state(group_id) else (None,) * self.groups[group_id]["block_size"]
            self.states.pop(block_id, None)

    def cache(self, request_id: str, group_id: int, block_id: int, num_tokens: int, kind: CauseKind = CauseKind.BLOCK_FULL) -> None:
        made, size = self.made[request_id], self.groups[group_id]["block_size"]
        digest = self.digest(request_id, num_tokens)
        start = (num_tokens - 1) // (self.unit if num_tokens % size else size) * (self.unit if num_tokens % size else size)
        key = f"{digest}:{group_id}"
        duplicates = list(self.keys.get(key, []))
        self.keys.setdefault(key, []).append(block_id)
        self.block_keys.setdefault(block_id, []).append((key, num_tokens))
        made.cached[group_id] = num_tokens // size
        index = (num_tokens - 1) // size
        self.emit(
            "schedule",
            e.BlockCached(
                cause=Cause(kind, {"logical_index": index, "num_tokens": num_tokens}), request_id=request_id, group_id=group_id, block_id=block_id,
                block_hash=digest, parent_hash=self.digest(request_id, start) if start else None, token_ids=made.tokens[start:num_tokens],
                duplicates=duplicates, num_hash_tokens=num_tokens, num_cached_block=num_tokens // size,
            ),
        )  # fmt: skip

    def evict(self, block_id: int, cause: Cause, request_id: str | None = None, group_id: int | None = None) -> None:
        key, _ = self.block_keys[block_id].pop(0)
        self.keys[key].remove(block_id)
        if not self.keys[key]:
            del self.keys[key]
        digest = key.rpartition(":")[0]
        self.emit("schedule", e.BlockEvicted(cause=cause, request_id=request_id, group_id=group_id, block_id=block_id, block_hash=digest))

    def skip(self, request_id: str, group_id: int, indices: list[int], cause: Cause) -> None:
        table = self.made[request_id].tables[group_id]
        ids = [table[i] for i in indices]
        for i in indices:
            table[i] = 0
        held, hashed, plain = self._sort(ids)
        self.emit(
            "schedule",
            e.BlocksSkipped(
                cause=cause, request_id=request_id, group_id=group_id, logical_indices=indices, block_ids=ids, prepended=plain, appended=hashed,
                still_referenced=held,
            ),
        )  # fmt: skip

    def _sort(self, ids: list[int]) -> tuple[list[int], list[int], list[int]]:
        """R1.7: those that nobody holds any more go to the tail if hashed, else to the head."""
        held = [b for b in ids if self._block(b).ref_cnt]
        hashed = [b for b in ids if b not in held and self.block_keys.get(b)]
        plain = [b for b in ids if b not in held and b not in hashed]
        for block_id in plain:
            self.content[block_id] = tuple(None for _ in self.content[block_id])
            self.states.pop(block_id, None)
        self.queue = [*plain, *self.queue, *hashed]
        return held, hashed, plain

    def free(self, op: str, cause: Cause, ids: list[int], request_id: str | None = None, group_id: int | None = None) -> None:
        held, hashed, plain = self._sort(ids)
        self.emit(
            op,
            e.BlocksFreed(
                cause=cause, request_id=request_id, group_id=group_id, block_ids=ids, prepended=plain, appended=hashed, still_referenced=held
            ),
        )  # fmt: skip

    def finish(self, request_id: str) -> None:
        made = self.made[request_id]
        made.status = "FINISHED_LENGTH_CAPPED"
        self.emit("update_from_output", e.RequestFinished(cause=Cause(CauseKind.MAX_TOKENS, {"max_tokens": 2}), request_id=request_id, reason="length"))
        for group_id in range(len(self.groups)):
            ids = [b for b in reversed(made.tables[group_id]) if b]
            made.tables[group_id] = []
            cause = Cause(CauseKind.REQUEST_FINISHED, {"reason": "length"})
            self.free("update_from_output", cause, ids, request_id, group_id)

    def schedule(self, request_id: str, num_tokens: int) -> None:
        made = self.made[request_id]
        made.status = "RUNNING"
        cause = Cause(CauseKind.PREFILL, {"num_new_tokens": num_tokens})
        first = made.computed
        self.emit("schedule", e.RequestScheduled(cause=cause, request_id=request_id, num_scheduled_tokens=num_tokens, num_computed_tokens=first))

    def end_schedule(self, **scheduled: int) -> None:
        for request_id, num_tokens in scheduled.items():
            self.made[request_id].computed += num_tokens
        self.scheduled = scheduled
        self.emit("schedule", e.StepScheduled(cause=Cause(CauseKind.NEXT_STEP), num_scheduled_tokens=scheduled, token_budget_left=0))

    def compute(self, request_id: str, num_tokens: int) -> None:
        """The worker: rows, slots, keys and values or states, for the last `num_tokens` tokens that were planned."""
        made = self.made[request_id]
        last = made.computed
        positions = list(range(last - num_tokens, last))
        row = list(self.made).index(request_id)
        token_ids = [made.tokens[p] for p in positions]
        for group_id, group in enumerate(self.groups):
            table, size = made.tables[group_id], group["block_size"]
            start = len(made.rows[group_id])
            if new := table[start:]:
                made.rows[group_id] += new
                cause = Cause(CauseKind.APPENDED if start else CauseKind.ADDED_TO_BATCH)
                self.emit("execute_model", e.RowUpdated(cause=cause, request_id=request_id, group_id=group_id, row=row, start=start, block_ids=new))
            where = {"request_id": request_id, "group_id": group_id}
            if self.is_state(group_id):
                block_id, first = table[(last - 1) // size], last - num_tokens
                source = {"source_block_id": made.rows[group_id][(first - 1) // size] if first else None, "num_source_tokens": first}
                self.states[block_id] = last
                cause = Cause(CauseKind.SLOT_MAPPING)
                self.emit("execute_model", e.StateWritten(cause=cause, block_id=block_id, num_tokens=last, **source, **where))
                continue
            slots = [table[p // size] * size + p % size for p in positions]
            at = {"cause": Cause(CauseKind.BLOCK_TABLE_LOOKUP), **where}
            self.emit("execute_model", e.SlotsMapped(positions=positions, slots=slots, token_ids=token_ids, **at))
            for slot, token in zip(slots, token_ids, strict=True):
                slots_before = self.content[slot // size]
                self.content[slot // size] = (*slots_before[: slot % size], token, *slots_before[slot % size + 1 :])
            written = {"cause": Cause(CauseKind.SLOT_MAPPING), **where}
            self.emit("execute_model", e.KVWritten(slots=slots, token_ids=token_ids, num_layers=1, backend="none", **written))

    def sample(self, request_id: str) -> None:
        made = self.made[request_id]
        token_id, position = PROMPT[len(made.tokens) % len(PROMPT)], len(made.tokens)
        made.tokens.append(token_id)
        cause, hashes = Cause(CauseKind.FORCED), len(made.tokens) // self.unit
        event = e.TokenSampled(cause=cause, request_id=request_id, token_id=token_id, position=position, num_block_hashes=hashes)
        self.emit("update_from_output", event)
