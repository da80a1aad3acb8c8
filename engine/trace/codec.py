"""Traces as files: JSON, plain or gzip-compressed, the same bytes every time.

Frames share most of their state, so each is written as its difference from the one before (`engine.trace.codec_wire`). Reading gives the same sharing
back.
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import InvalidInput
from engine.trace.codec_wire import FORMAT, Reader, WireTrace, Writer
from engine.trace.frame import TRACE_VERSION, Trace

MAX_BYTES = 512 * 1024 * 1024
"""A trace may unpack to this many bytes at most: a small compressed file must not be able to fill the memory."""


class _Envelope(msgspec.Struct):
    format: str = ""
    version: int = 0


def encode_json(trace: Trace) -> bytes:
    """The trace as JSON. Equal traces give equal bytes."""
    return msgspec.json.encode(Writer().write(trace, TRACE_VERSION))


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
        wire = msgspec.json.decode(data, type=WireTrace)
        frames = Reader(wire).frames()
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} is damaged: {_reason(error)}; record it again or take an undamaged copy") from None
    except MemoryError as error:
        raise InvalidInput(f"{name} unfolds to {_reason(error)}, which is more than a trace may have; record a shorter run") from None
    except (LookupError, ValueError):
        raise InvalidInput(f"{name} is damaged: a frame refers to something that is not in the file; record it again or take an undamaged copy") from None
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


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return text if text[:2].isupper() else text[0].lower() + text[1:]  # JSON stays JSON
