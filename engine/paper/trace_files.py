"""Traces of real services, read from files: when requests came, and how many tokens went in and out. Bad files are refused with one sentence and the line."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engine.errors import InvalidInput
from engine.paper.workload import Workload, WorkloadRequest

MAX_FILE_BYTES = 50_000_000
MAX_REQUESTS = 200_000
MAX_LINES = 1_000_000
"""So many lines with so few requests hold nothing worth reading; without a bound, 50 MB of empty lines would keep a reader waiting for a minute."""

MAX_TOKENS = 10_000_000
"""A longer prompt or output is taken for a mistake."""


@dataclass(frozen=True)
class _Format:
    """Names of the columns or fields, lower case. `unit`: seconds that a number in `arrival` stands for."""

    title: str
    prompt_len: str
    output_len: str
    arrival: str
    unit: float = 1.0


_FORMATS = (
    _Format("Azure LLM inference trace", "contexttokens", "generatedtokens", "timestamp"),
    _Format("Mooncake trace", "input_length", "output_length", "timestamp", unit=0.001),
    _Format("lengths of requests", "prompt_len", "output_len", "arrival"),
)
_EXPECTED = "ContextTokens and GeneratedTokens (Azure), input_length and output_length (Mooncake), or prompt_len and output_len"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def read_trace(data: bytes, name: str, progress: Callable[[float], None] | None = None) -> Workload:
    """Read a trace; `name` is the file's name, for messages. `progress`: called with the share that is read, 0 to 1, about a hundred times.

    Accepted: CSV with a header line (columns TIMESTAMP, ContextTokens, GeneratedTokens as in Azure's traces; or prompt_len, output_len and if wanted
    arrival, in seconds), and JSON with one object per line (timestamp in milliseconds, input_length, output_length as in Mooncake's traces; or the plain
    names). Other columns are ignored. Arrivals of the result are in seconds from the first one; without any, all requests arrive at once, in iterations.
    At most 50 MB, 1,000,000 lines and 200,000 requests, each with 1 to 10,000,000 prompt and output tokens. Raises InvalidInput, always with the line.
    """
    if not data.removeprefix(_BYTE_ORDER_MARK).strip():
        raise InvalidInput(f"{name}: the file is empty, but a trace has at least one request: bring one with {_EXPECTED}")
    if len(data) > MAX_FILE_BYTES:
        line = data.count(b"\n", 0, MAX_FILE_BYTES) + 1
        mend = f"cut it before line {line}" if line > 1 else "its first line alone is longer, so it is no trace"
        raise InvalidInput(f"{name}:{line}: the file has {len(data) / 1e6:.0f} MB, but at most {MAX_FILE_BYTES / 1e6:.0f} MB are read: {mend}")
    lines = _Lines(data, name, progress)
    first = next((line for line in lines if line.strip()), "").strip()
    if first.startswith("["):
        raise InvalidInput(f"{name}:{lines.number}: this is a JSON list, but a trace has one JSON object per line: write every request on a line of its own")
    rows = _json_rows(first, lines) if first.startswith("{") else _csv_rows(first, lines)
    requests: list[WorkloadRequest] = []
    for used, line, row in rows:
        if len(requests) == MAX_REQUESTS:
            raise InvalidInput(f"{name}:{line}: there are more than {MAX_REQUESTS:,} requests: cut the file before this line")
        arrival = _arrival(row.get(used.arrival), used, f"{name}:{line}")
        prompt_len = _length(row.get(used.prompt_len), used.prompt_len, f"{name}:{line}")
        output_len = _length(row.get(used.output_len), used.output_len, f"{name}:{line}")
        requests.append(WorkloadRequest(arrival if arrival is not None else math.nan, prompt_len, output_len, f"R{len(requests)}"))
        if math.isnan(requests[0].arrival) != (arrival is None):
            raise InvalidInput(f"{name}:{line}: {used.arrival} is given for some requests only: give it for all of them or for none")
    if not requests:
        raise InvalidInput(f"{name}:{lines.number}: there are column names, but no request follows them: add one per line")
    lines.tell(1.0)
    source = f"{name} ({used.title})"
    if math.isnan(requests[0].arrival):
        return Workload(name, source, tuple(WorkloadRequest(0.0, r.prompt_len, r.output_len, r.request_id) for r in requests), "All requests arrive at once.")
    start = min(r.arrival for r in requests)
    ordered = sorted((WorkloadRequest(r.arrival - start, r.prompt_len, r.output_len, r.request_id) for r in requests), key=lambda r: r.arrival)
    return Workload(name, source, tuple(ordered), arrival_unit="seconds")


class _Lines(Iterator[str]):
    """Decoded lines one after the other; `number` is that of the last one, from 1. Raises InvalidInput where bytes are no UTF-8."""

    def __init__(self, data: bytes, name: str, progress: Callable[[float], None] | None) -> None:
        self.name = name
        self.number = 0
        self._stream = io.BytesIO(data.removeprefix(_BYTE_ORDER_MARK))
        self._size = len(data)
        self._progress = progress
        self._told = 0.0

    def __next__(self) -> str:
        raw = self._stream.readline()
        if not raw:
            raise StopIteration
        self.number += 1
        if self.number > MAX_LINES:
            raise InvalidInput(f"{self.name}:{self.number}: there are more than {MAX_LINES:,} lines: cut the file before this line, or its empty lines out")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{self.name}:{self.number}: byte {error.start + 1} of this line is no UTF-8 text: save the file as UTF-8, not compressed"
            ) from None
        if "\0" in text:
            raise InvalidInput(f"{self.name}:{self.number}: this line has zero bytes in it, so it is no text: save the trace as UTF-8 text")
        share = self._stream.tell() / self._size
        if share >= self._told + 0.01:
            self.tell(min(share, 0.99))
        return text

    def tell(self, share: float) -> None:
        self._told = share
        if self._progress is not None:
            self._progress(share)


def _format_of(names: set[str], place: str) -> _Format:
    """The format whose two columns of lengths are there."""
    for candidate in _FORMATS:
        if {candidate.prompt_len, candidate.output_len} <= names:
            return candidate
    for candidate in _FORMATS:
        for there, missing in ((candidate.prompt_len, candidate.output_len), (candidate.output_len, candidate.prompt_len)):
            if there in names:
                raise InvalidInput(f"{place}: there is {there}, but {missing} is missing: add it")
    shown = ", ".join(map(repr, sorted(names)[:6]))[:120]
    raise InvalidInput(f"{place}: the names here are {shown or 'none'}, but the lengths must be called {_EXPECTED}")


def _csv_rows(first: str, lines: _Lines) -> Iterator[tuple[_Format, int, Mapping[str, Any]]]:
    try:
        columns = [column.strip().lower() for column in next(csv.reader([first]))]
        used = _format_of(set(columns), f"{lines.name}:{lines.number}")
        needed = max(columns.index(used.prompt_len), columns.index(used.output_len)) + 1
        for fields in csv.reader(lines):
            if not any(field.strip() for field in fields):
                continue
            if len(fields) < needed:
                raise InvalidInput(f"{lines.name}:{lines.number}: this line has {len(fields)} of the {len(columns)} columns: fill in the missing values")
            yield used, lines.number, dict(zip(columns, fields, strict=False))
    except csv.Error as error:
        raise InvalidInput(f"{lines.name}:{lines.number}: this line is no CSV ({error}): mend its quotes or cut the line out") from None


def _json_rows(first: str, lines: _Lines) -> Iterator[tuple[_Format, int, Mapping[str, Any]]]:
    used = None
    text: str | None = first
    while text is not None:
        if text.strip():
            place = f"{lines.name}:{lines.number}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                raise InvalidInput(f"{place}: this line is no JSON object: write one request as {{...}} per line") from None
            if not isinstance(row, dict):
                raise InvalidInput(f"{place}: this line is JSON, but no object: write one request as {{...}} per line")
            row = {key.lower(): value for key, value in row.items()}
            used = used or _format_of(set(row), place)
            yield used, lines.number, row
        text = next(lines, None)


def _length(value: object, field: str, place: str) -> int:
    if value is None:
        raise InvalidInput(f"{place}: {field} is missing: give a whole number of tokens")
    text = value.strip() if isinstance(value, str) else str(value)
    shown = text if len(text) <= 30 else text[:30] + "…"
    if isinstance(value, bool | float | list | dict) or not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise InvalidInput(f"{place}: {field} is {shown!r}, but it must be a whole number of tokens")
    length = int(text) if len(text) <= 30 else -1 if text.startswith("-") else MAX_TOKENS + 1  # Python refuses to read thousands of digits
    if length < 0:
        raise InvalidInput(f"{place}: {field} is {shown}, but a length cannot be negative")
    if length == 0:
        raise InvalidInput(f"{place}: {field} is 0, but a request has at least 1 token in and 1 out: cut this line out")
    if length > MAX_TOKENS:
        raise InvalidInput(f"{place}: {field} is {shown}, but more than {MAX_TOKENS:,} tokens are taken for a mistake")
    return length


def _arrival(value: object, used: _Format, place: str) -> float | None:
    """Seconds (since whenever); None where nothing is given."""
    text = value.strip() if isinstance(value, str) else "" if value is None else str(value)
    if not text:
        return None
    shown = text if len(text) <= 40 else text[:40] + "…"
    if not isinstance(value, bool | list | dict) and re.fullmatch(r"\d{1,15}(\.\d{1,15})?([eE][+-]?\d{1,2})?", text, re.ASCII):
        return float(text) * used.unit
    date = _DATE.fullmatch(text)
    if date is not None:
        day, clock, fraction, zone = date.groups()
        try:
            moment = datetime.fromisoformat(f"{day}T{clock}{zone if zone and zone != 'Z' else '+00:00'}")
            return moment.astimezone(UTC).timestamp() + float(fraction or 0)
        except (ValueError, OverflowError):
            pass
    raise InvalidInput(f"{place}: {used.arrival} is {shown!r}, but it must be a number that is not negative, or a date and time such as 2023-11-16 18:15:46.68")
