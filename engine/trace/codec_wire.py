"""The shape of a trace in a file, and the way between it and frames.

A frame is written as what changed since the frame before; a field that is missing is as it was. Distinct block, request and row states stand once in
tables and are named by index. Lists that only grow (tokens, hashes, block tables) stand once, as long as they got, and a state names how much of one it
has. Reading gives the same sharing back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import msgspec

from engine.trace.codec_delta import Moves, Replay, apply_changes, find_changes, find_moves
from engine.trace.events import AnyEvent
from engine.trace.frame import BlockState, Counters, Frame, RequestState, Trace, TraceHeader, WorkerRow
from engine.trace.shared_sequence import SharedSequence

FORMAT = "pagewalk-trace"

MAX_ELEMENTS = 100_000_000
"""What a file names once may be unfolded many times; to this many list elements at most."""

Part = tuple[int, int]
"""The first so many elements of a list: its index in the table of lists, and their number."""
MapEntry = tuple[str, tuple[int, ...]]
T = TypeVar("T")
S = TypeVar("S", bound=Hashable)


class WireRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A RequestState with its lists named."""

    request_id: str
    status: str
    num_prompt_tokens: int
    token_ids: Part
    num_computed_tokens: int
    block_ids: tuple[Part, ...]
    block_hashes: Part
    num_cached_block: tuple[int | None, ...]
    num_preemptions: int = 0
    forced: Part | None = None
    sequence_group: str | None = None
    parent_id: str | None = None
    cpu_block_ids: Part | None = None
    cumulative_logprob: float | None = None


class WireRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A WorkerRow with its lists named, but for what is stale: that is short and only ever gets shorter."""

    row: int
    request_id: str
    block_ids: tuple[Part, ...]
    stale_block_ids: tuple[tuple[int, ...], ...] = ()


class WireQueueMoves(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Moves` of the free queue."""

    out: list[int] = []
    head: list[int] = []
    tail: list[int] = []
    replace: list[int] = []
    whole: list[int] | None = None


class WireMapMoves(msgspec.Struct, frozen=True, omit_defaults=True):
    """`Moves` of the prefix cache."""

    out: list[str] = []
    head: list[MapEntry] = []
    tail: list[MapEntry] = []
    replace: list[MapEntry] = []
    whole: list[MapEntry] | None = None


class WireFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a frame has that the one before had not. `blocks` and `requests`: (index, state) pairs; the numbers, where they changed."""

    seq: int
    step: int
    op: str
    op_index: int
    event: AnyEvent
    num_blocks: int | None = None
    blocks: list[tuple[int, int]] = []
    free_queue: WireQueueMoves | None = None
    hash_map: WireMapMoves | None = None
    num_requests: int | None = None
    requests: list[tuple[int, int]] = []
    running: tuple[str, ...] | None = None
    waiting: tuple[str, ...] | None = None
    rows: list[int] | None = None
    slot_mapping: tuple[int, ...] | None = None
    scheduled: dict[str, int] | None = None
    counters: Counters | None = None
    num_cpu_blocks: int | None = None
    cpu_blocks: list[tuple[int, int]] = []
    cpu_free_queue: list[int] | None = None
    swapped: tuple[str, ...] | None = None


class WireTrace(msgspec.Struct):
    """A whole file."""

    format: str
    version: int
    header: TraceHeader
    complete: bool
    block_states: list[BlockState]
    request_states: list[WireRequest]
    worker_rows: list[WireRow]
    int_lists: list[list[int]]
    hash_lists: list[list[str]]
    frames: list[WireFrame]


class _Table(Generic[S]):
    """Distinct values in order of first use, each as `write` puts it. Objects are known by identity first: frames share them."""

    def __init__(self, write: Callable[[S], Any]) -> None:
        self.values: list[Any] = []
        self._write = write
        self._index: dict[S, int] = {}
        self._by_id: dict[int, int] = {}

    def index(self, value: S) -> int:
        known = self._by_id.get(id(value))  # the trace keeps all its objects alive meanwhile
        if known is None:
            known = self._index.get(value)
            if known is None:
                known = self._index[value] = len(self.values)
                self.values.append(self._write(value))
            self._by_id[id(value)] = known
        return known


class _Lists(Generic[T]):
    """Lists that grow, each in the hands of an owner."""

    def __init__(self) -> None:
        self.values: list[list[T]] = []
        self._of_owner: dict[Hashable, int] = {}

    def part(self, owner: Hashable, value: Sequence[T]) -> Part:
        """Where `value` stands: the start of its owner's last list, or that list goes on with it; else a new one."""
        index = self._of_owner.get(owner)
        wanted = list(value)
        if index is not None:
            stored = self.values[index]
            if stored[: len(wanted)] == wanted:
                return index, len(wanted)
            if wanted[: len(stored)] == stored:
                stored.extend(wanted[len(stored) :])
                return index, len(wanted)
        self._of_owner[owner] = len(self.values)
        self.values.append(wanted)
        return len(self.values) - 1, len(wanted)


class Writer:
    """Turns a trace into its wire form. Equal traces give equal wire forms."""

    def __init__(self) -> None:
        self._ints: _Lists[int] = _Lists()
        self._hashes: _Lists[str] = _Lists()
        self._blocks: _Table[BlockState] = _Table(lambda state: state)
        self._requests: _Table[RequestState] = _Table(self._request)
        self._rows: _Table[WorkerRow] = _Table(self._row)

    def write(self, trace: Trace, version: int) -> WireTrace:
        """The whole trace."""
        frames = [self._frame(frame, before) for before, frame in zip([None, *trace.frames], list(trace.frames), strict=False)]
        return WireTrace(
            FORMAT, version, trace.header, trace.complete,
            self._blocks.values, self._requests.values, self._rows.values, self._ints.values, self._hashes.values, frames,
        )  # fmt: skip

    def _frame(self, frame: Frame, before: Frame | None) -> WireFrame:
        old = before if before is not None else EMPTY
        queue = find_moves(old.free_queue, frame.free_queue, _same)
        entries = find_moves(old.hash_map, frame.hash_map, _KEY)
        return WireFrame(
            seq=frame.seq, step=frame.step, op=frame.op, op_index=frame.op_index, event=frame.event,
            num_blocks=_if_changed(len(frame.blocks), len(old.blocks)),
            blocks=[(i, self._blocks.index(state)) for i, state in find_changes(old.blocks, frame.blocks)],
            free_queue=WireQueueMoves(*queue) if queue is not None else None,
            hash_map=WireMapMoves(*entries) if entries is not None else None,
            num_requests=_if_changed(len(frame.requests), len(old.requests)),
            requests=[(i, self._requests.index(state)) for i, state in find_changes(old.requests, frame.requests)],
            running=_if_changed(frame.running, old.running), waiting=_if_changed(frame.waiting, old.waiting),
            rows=None if frame.rows == old.rows else [self._rows.index(row) for row in frame.rows],
            slot_mapping=_if_changed(frame.slot_mapping, old.slot_mapping),
            scheduled=_if_changed(frame.scheduled, old.scheduled), counters=_if_changed(frame.counters, old.counters),
            num_cpu_blocks=_if_changed(len(frame.cpu_blocks), len(old.cpu_blocks)),
            cpu_blocks=[(i, self._blocks.index(state)) for i, state in find_changes(old.cpu_blocks, frame.cpu_blocks)],
            cpu_free_queue=_if_changed(list(frame.cpu_free_queue), list(old.cpu_free_queue)), swapped=_if_changed(frame.swapped, old.swapped),
        )  # fmt: skip

    def _request(self, state: RequestState) -> WireRequest:
        name = state.request_id
        return WireRequest(
            request_id=name, status=state.status, num_prompt_tokens=state.num_prompt_tokens,
            token_ids=self._ints.part(("tokens", name), state.token_ids), num_computed_tokens=state.num_computed_tokens,
            block_ids=tuple(self._ints.part(("table", name, group_id), table) for group_id, table in enumerate(state.block_ids)),
            block_hashes=self._hashes.part(name, state.block_hashes), num_cached_block=state.num_cached_block, num_preemptions=state.num_preemptions,
            forced=self._ints.part(("forced", name), state.forced) if state.forced else None,
            sequence_group=state.sequence_group, parent_id=state.parent_id, cumulative_logprob=state.cumulative_logprob,
            cpu_block_ids=self._ints.part(("cpu", name), state.cpu_block_ids) if state.cpu_block_ids else None,
        )  # fmt: skip

    def _row(self, row: WorkerRow) -> WireRow:
        parts = tuple(self._ints.part(("row", row.request_id, group_id), ids) for group_id, ids in enumerate(row.block_ids))
        return WireRow(row.row, row.request_id, parts, row.stale_block_ids)


class Reader:
    """Turns a wire form back into frames. Raises LookupError or ValueError where it does not fit together, MemoryError beyond MAX_ELEMENTS."""

    def __init__(self, wire: WireTrace) -> None:
        self._wire = wire
        self._elements_left = MAX_ELEMENTS
        self._parts: dict[tuple[str, Part], tuple[Any, ...]] = {}
        self._requests = [self._request(state) for state in wire.request_states]
        self._rows = [WorkerRow(r.row, r.request_id, tuple(self._ints(part) for part in r.block_ids), r.stale_block_ids) for r in wire.worker_rows]
        self._queue: Replay[int, int] = Replay(_same)
        self._map: Replay[str, MapEntry] = Replay(_KEY)

    def frames(self) -> list[Frame]:
        """All frames, in order."""
        frames: list[Frame] = []
        last = EMPTY
        for wire in self._wire.frames:
            last = self._frame(wire, last)
            frames.append(last)
        return frames

    def _frame(self, f: WireFrame, last: Frame) -> Frame:
        return Frame(
            seq=f.seq, step=f.step, op=f.op, op_index=f.op_index, event=f.event,
            blocks=_changed(last.blocks, f.blocks, f.num_blocks, self._wire.block_states),
            free_queue=self._queue.follow(_moves(f.free_queue)), hash_map=self._map.follow(_moves(f.hash_map)),
            requests=_changed(last.requests, f.requests, f.num_requests, self._requests),
            running=_or(f.running, last.running), waiting=_or(f.waiting, last.waiting),
            rows=last.rows if f.rows is None else tuple(_pick(self._rows, index) for index in f.rows),
            slot_mapping=_or(f.slot_mapping, last.slot_mapping), scheduled=_or(f.scheduled, last.scheduled), counters=_or(f.counters, last.counters),
            cpu_blocks=_changed(last.cpu_blocks, f.cpu_blocks, f.num_cpu_blocks, self._wire.block_states),
            cpu_free_queue=last.cpu_free_queue if f.cpu_free_queue is None else tuple(f.cpu_free_queue), swapped=_or(f.swapped, last.swapped),
        )  # fmt: skip

    def _request(self, state: WireRequest) -> RequestState:
        return RequestState(
            request_id=state.request_id, status=state.status, num_prompt_tokens=state.num_prompt_tokens, token_ids=self._ints(state.token_ids),
            num_computed_tokens=state.num_computed_tokens, block_ids=tuple(self._ints(part) for part in state.block_ids),
            block_hashes=self._part("hashes", self._wire.hash_lists, state.block_hashes), num_cached_block=state.num_cached_block,
            num_preemptions=state.num_preemptions, forced=self._ints(state.forced) if state.forced is not None else (),
            sequence_group=state.sequence_group, parent_id=state.parent_id, cumulative_logprob=state.cumulative_logprob,
            cpu_block_ids=self._ints(state.cpu_block_ids) if state.cpu_block_ids is not None else (),
        )  # fmt: skip

    def _ints(self, part: Part) -> tuple[int, ...]:
        return self._part("ints", self._wire.int_lists, part)

    def _part(self, kind: str, lists: list[list[T]], part: Part) -> tuple[T, ...]:
        known = self._parts.get((kind, part))
        if known is None:
            index, length = part
            values = _pick(lists, index)
            if not 0 <= length <= len(values):
                raise IndexError("length out of range")
            self._elements_left -= length
            if self._elements_left < 0:
                raise MemoryError(f"more than {MAX_ELEMENTS} list elements")
            known = self._parts[kind, part] = tuple(values[:length])
        return known


EMPTY = Frame(
    seq=-1, step=0, op="", op_index=0, event=None, blocks=SharedSequence(), free_queue=SharedSequence(), hash_map=SharedSequence(),  # type: ignore[arg-type]
    requests=SharedSequence(), running=(), waiting=(), rows=(), slot_mapping=(), scheduled={}, counters=Counters(), cpu_blocks=SharedSequence(),
)  # fmt: skip
"""What the first frame is compared with."""

_KEY: Callable[[MapEntry], str] = itemgetter(0)


def _same(block_id: int) -> int:
    return block_id


def _if_changed(value: T, before: T) -> T | None:
    return None if value == before else value


def _or(value: T | None, before: T) -> T:
    return before if value is None else value


def _pick(table: Sequence[T], index: int) -> T:
    if index < 0:
        raise IndexError("index out of range")  # Python would quietly count from the end
    return table[index]


def _changed(last: Sequence[T], pairs: list[tuple[int, int]], length: int | None, table: Sequence[T]) -> SharedSequence[T]:
    assert isinstance(last, SharedSequence)
    changes = [(index, _pick(table, number)) for index, number in pairs]
    return last if not changes and length is None else apply_changes(last, changes, _or(length, len(last)))


def _moves(wire: WireQueueMoves | WireMapMoves | None) -> Moves[Any, Any] | None:
    return None if wire is None else Moves(wire.out, wire.head, wire.tail, wire.replace, wire.whole)
