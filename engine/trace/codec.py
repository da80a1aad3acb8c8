"""Traces as files: JSON, plain or gzip-compressed, the same bytes every time.

Frames share most of their state, so the file has tables of distinct block, request and row states, free queues and hash maps, and each frame names
them by index. Reading gives the same sharing back.
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from engine.errors import InvalidInput
from engine.trace.events import AnyEvent
from engine.trace.frame import TRACE_VERSION, BlockState, Counters, Frame, RequestState, Trace, TraceHeader, WorkerRow

FORMAT = "pagewalk-trace"
MAX_BYTES = 512 * 1024 * 1024
"""A trace may unpack to this many bytes at most: a small compressed file must not be able to fill the memory."""

HashMap = tuple[tuple[str, tuple[int, ...]], ...]


class _WireFrame(msgspec.Struct, frozen=True):
    seq: int
    step: int
    op: str
    op_index: int
    event: AnyEvent
    blocks: list[int]
    free_queue: int
    hash_map: int
    requests: list[int]
    running: list[str]
    waiting: list[str]
    rows: list[int]
    slot_mapping: list[int]
    scheduled: dict[str, int]
    counters: Counters


class _WireTrace(msgspec.Struct):
    format: str
    version: int
    header: TraceHeader
    complete: bool
    block_states: list[BlockState]
    request_states: list[RequestState]
    worker_rows: list[WorkerRow]
    free_queues: list[tuple[int, ...]]
    hash_maps: list[HashMap]
    frames: list[_WireFrame]


class _Envelope(msgspec.Struct):
    format: str = ""
    version: int = 0


T = TypeVar("T", bound=Hashable)


class _Table(Generic[T]):
    """Distinct values in order of first use."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._index: dict[T, int] = {}

    def index(self, value: T) -> int:
        found = self._index.get(value)
        if found is None:
            found = self._index[value] = len(self.values)
            self.values.append(value)
        return found


def encode_json(trace: Trace) -> bytes:
    """The trace as JSON. Equal traces give equal bytes."""
    blocks: _Table[BlockState] = _Table()
    requests: _Table[RequestState] = _Table()
    rows: _Table[WorkerRow] = _Table()
    queues: _Table[tuple[int, ...]] = _Table()
    maps: _Table[HashMap] = _Table()
    frames = [
        _WireFrame(
            seq=f.seq, step=f.step, op=f.op, op_index=f.op_index, event=f.event,
            blocks=[blocks.index(b) for b in f.blocks], free_queue=queues.index(tuple(f.free_queue)), hash_map=maps.index(tuple(f.hash_map)),
            requests=[requests.index(r) for r in f.requests], running=list(f.running), waiting=list(f.waiting), rows=[rows.index(r) for r in f.rows],
            slot_mapping=list(f.slot_mapping), scheduled=f.scheduled, counters=f.counters,
        )
        for f in trace.frames
    ]  # fmt: skip
    wire = _WireTrace(FORMAT, TRACE_VERSION, trace.header, trace.complete, blocks.values, requests.values, rows.values, queues.values, maps.values, frames)
    return msgspec.json.encode(wire)


def decode_json(data: bytes, name: str = "the trace") -> Trace:
    """Read what `encode_json` wrote. `name` is what messages call the file.

    Raises InvalidInput, one sentence, for anything that is not a whole trace of this version.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} is not a whole trace: {_reason(error)}; record it again or take an undamaged copy") from None
    if envelope.format != FORMAT:
        raise InvalidInput(f"{name} is not a Pagewalk trace (its “format” is not “{FORMAT}”); traces come from `python -m scenarios run ID --trace FILE`")
    if envelope.version != TRACE_VERSION:
        raise InvalidInput(
            f"{name} is a trace of version {envelope.version}, but this Pagewalk reads version {TRACE_VERSION}: run its scenario again to record it anew"
        )
    try:
        wire = msgspec.json.decode(data, type=_WireTrace)
        frames = [_frame(wire, f) for f in wire.frames]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} is damaged: {_reason(error)}; record it again or take an undamaged copy") from None
    except IndexError:
        raise InvalidInput(f"{name} is damaged: a frame refers to a state that is not in the file; record it again or take an undamaged copy") from None
    return Trace(wire.header, frames, wire.complete)


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; ``.gz`` at the end of the name compresses. Whole or not at all. Raises InvalidInput when the place cannot be written."""
    target = Path(path)
    data = encode_json(trace)
    if target.suffix == ".gz":
        buffer = io.BytesIO()
        with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as file:  # no name and no clock: equal traces, equal files
            file.write(data)
        data = buffer.getvalue()
    part: str | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as handle:
            part = handle.name
            handle.write(data)
        os.replace(part, target)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        raise InvalidInput(f"the trace cannot be written to {target}: {error.strerror or error}; choose another place") from None


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, compressed or not (its first bytes tell). Raises InvalidInput, one sentence with the file's name."""
    source = Path(path)
    try:
        with source.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
            data = stream.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(f"{source.name} is not a whole trace: {_reason(error)}; record it again or take an undamaged copy") from None
    except OSError as error:
        raise InvalidInput(f"{source} cannot be read: {error.strerror or error}; check the path") from None
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{source.name} unpacks to more than {MAX_BYTES // 2**20} MB, which is more than a trace may have; record a shorter run")
    return decode_json(data, source.name)


def _frame(wire: _WireTrace, f: _WireFrame) -> Frame:
    return Frame(
        seq=f.seq, step=f.step, op=f.op, op_index=f.op_index, event=f.event,
        blocks=_pick(wire.block_states, f.blocks), free_queue=_pick(wire.free_queues, [f.free_queue])[0], hash_map=_pick(wire.hash_maps, [f.hash_map])[0],
        requests=_pick(wire.request_states, f.requests), running=tuple(f.running), waiting=tuple(f.waiting), rows=_pick(wire.worker_rows, f.rows),
        slot_mapping=tuple(f.slot_mapping), scheduled=f.scheduled, counters=f.counters,
    )  # fmt: skip


V = TypeVar("V")


def _pick(table: Sequence[V], indices: Sequence[int]) -> tuple[V, ...]:
    if any(i < 0 for i in indices):
        raise IndexError  # Python would quietly count from the end
    return tuple(table[i] for i in indices)


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return text[0].lower() + text[1:]
