"""Selectors find frames; facts are read from the frame they find and compared with what the scenario expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.trace.events import SlotsMapped, kind_of
from engine.trace.frame import BlockState, Frame, RequestState, Trace
from scenarios.hash_names import HashNames
from scenarios.schema import POINT_KINDS, Expectation, Scenario, Selector

Decode: TypeAlias = Callable[[list[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class Failure:
    """An expectation that did not hold. `place`: where it stands (``file:line: expect[3].ref_cnt``); `seq`: the frame, None when no event was found."""

    place: str
    at: str
    fact: str
    expected: Any
    got: Any
    seq: int | None

    def __str__(self) -> str:
        if self.seq is None:
            return f"{self.place}: {self.at}: {self.got}"
        return f"{self.place}: {self.at} (frame {self.seq}): expected {self.fact} {self.expected!r}, got {self.got!r}"


def matches(selector: Selector, frame: Frame) -> bool:
    """Whether the frame's event is one of those that the selector counts."""
    event = frame.event
    if kind_of(event) != selector.kind or selector.group not in (None, event.group_id):
        return False
    return selector.request in (None, event.request_id) and selector.step in (None, frame.step)


def select(selector: Selector, frames: Sequence[Frame]) -> Frame | None:
    """The frame that a selector names, None when there is none."""
    if not frames:
        return None
    if selector.kind in POINT_KINDS:
        return frames[0 if selector.kind == "start" else -1]
    found = [f for f in frames if matches(selector, f)]
    index = selector.nth - 1 if selector.nth > 0 else selector.nth
    return found[index] if -len(found) <= index < len(found) else None


def selector_text(selector: Selector) -> str:
    """A selector in words, as in ``2nd kv_written of A in step 3`` or ``1st block_cached in group 1``."""
    if selector.kind in POINT_KINDS:
        return f"the {selector.kind}"
    text = f"{_ordinal(selector.nth)} {selector.kind}"
    if selector.request is not None:
        text += f" of {selector.request}"
    if selector.group is not None:
        text += f" in group {selector.group}"
    return text if selector.step is None else f"{text} in step {selector.step}"


def check_expectations(scenario: Scenario, trace: Trace, decode: Decode) -> list[Failure]:
    """Compare every expectation with the recorded run; what differs, in the order of the file. `decode` is the tokenizer's. Changes nothing."""
    failures: list[Failure] = []
    for index, expectation in enumerate(scenario.expect):
        at = selector_text(expectation.at)
        frame = select(expectation.at, trace.frames)
        if frame is None:
            there = sum(matches(expectation.at, f) for f in trace.frames)
            place = str(scenario.origin.problem(("expect", index, "at"), "")).removesuffix(": ")
            failures.append(Failure(place, at, "event", at, f"no such event; the run has {there} of them", None))
            continue
        facts = sorted(expectation.facts.items(), key=lambda item: scenario.origin.lines.get(("expect", index, item[0]), 0))
        for fact, expected in facts:
            got = read_fact(fact, expected, frame, trace, decode, expectation.at.group)
            if got != expected:
                place = str(scenario.origin.problem(("expect", index, fact), "")).removesuffix(": ")
                failures.append(Failure(place, at, fact, expected, got, frame.seq))
    return failures


def num_facts(expectations: Iterable[Expectation]) -> int:
    """How many single facts a scenario expects."""
    return sum(len(e.facts) for e in expectations)


def read_fact(fact: str, expected: Any, frame: Frame, trace: Trace, decode: Decode, group: int | None = None) -> Any:
    """What the frame says about `fact`, in the shape of `expected`: only the blocks, requests, positions and fields that `expected` names, and of block
    tables only that of `group` when there is one."""
    if fact in _TABLES:
        return {request_id: _in_shape(_TABLES[fact](frame, request_id), wanted, group) for request_id, wanted in expected.items()}
    if fact == "hash_names":
        names = HashNames(trace, trace.frames[: frame.seq + 1])
        return {block_id: [names(key) for key in frame.blocks[block_id].block_hashes] for block_id in expected}
    if fact == "page_size_bytes":
        return [described.get("page_size_bytes") for described in trace.header.config.get("kv_cache_groups", ())]
    if fact in _BY_KEY:
        read = _BY_KEY[fact]
        return {key: read(frame, key, trace) for key in expected}
    if fact == "free_queue_starts_with":
        return list(frame.free_queue)[: len(expected)]
    if fact == "tokens":
        return {r: _like(wanted, _output_texts(frame, r, trace)) for r, wanted in expected.items()}
    if fact == "output_text":
        return {r: _like([wanted], [_text(frame, r, decode)])[0] for r, wanted in expected.items()}
    if fact in ("block_tokens", "cpu_block_tokens"):
        blocks = frame.blocks if fact == "block_tokens" else frame.cpu_blocks
        return {b: _like(wanted, _block_texts(blocks[b], trace)) for b, wanted in expected.items()}
    if fact == "event":
        return {name: _plain(getattr(frame.event, name, None)) for name in expected}
    if fact in ("block_ids", "slots", "num_hit_tokens"):
        return _plain(getattr(frame.event, fact, None))
    return _WHOLE[fact](frame)


_WHOLE: dict[str, Callable[[Frame], Any]] = {
    "free_queue": lambda f: list(f.free_queue),
    "num_free": lambda f: len(f.free_queue),
    "hashed": lambda f: [b.block_id for b in f.blocks if b.block_hashes],
    "hash_map_size": lambda f: len(f.hash_map),
    "cpu_free_queue": lambda f: list(f.cpu_free_queue),
    "slot_mapping": lambda f: list(f.slot_mapping),
    "running": lambda f: list(f.running),
    "waiting": lambda f: list(f.waiting),
    "swapped": lambda f: list(f.swapped),
    "cause": lambda f: f.event.cause.kind.value,
}


def _of_request(read: Callable[[RequestState], Any]) -> Callable[[Frame, Any, Trace], Any]:
    def value(frame: Frame, request_id: Any, trace: Trace) -> Any:
        request = frame.request(request_id)
        return None if request is None else read(request)

    return value


def _block_tables(frame: Frame, request_id: str) -> Sequence[Sequence[int]] | None:
    request = frame.request(request_id)
    return None if request is None else request.block_ids


def _worker_row(frame: Frame, request_id: str) -> Sequence[Sequence[int]] | None:
    return next((row.block_ids for row in frame.rows if row.request_id == request_id), None)


def _stale_tail(frame: Frame, request_id: str) -> Sequence[Sequence[int]] | None:
    return next((row.stale_block_ids or [()] * len(row.block_ids) for row in frame.rows if row.request_id == request_id), None)


_TABLES: dict[str, Callable[[Frame, str], Sequence[Sequence[int]] | None]] = {
    "block_table": _block_tables,
    "worker_row": _worker_row,
    "stale_tail": _stale_tail,
}
"""Facts that are one list per group, by name."""


def _in_shape(found: Sequence[Sequence[int]] | None, wanted: Any, group: int | None) -> Any:
    """All tables of the request, or only that of `group` or of the one group that there is, when one is what is wanted."""
    if found is None:
        return None
    tables = [list(table) for table in found]
    one = group is not None or (len(tables) == 1 and not any(isinstance(row, list) for row in wanted))
    return tables[group or 0] if one else tables


def _slot(frame: Frame, position: int, trace: Trace) -> int | None:
    """Where the event's request keeps `position` in the event's group: as the worker mapped it if this is its event, else by the block table (R8.4)."""
    event = frame.event
    if isinstance(event, SlotsMapped):
        return dict(zip(event.positions, event.slots, strict=True)).get(position)
    request = frame.request(event.request_id) if event.request_id is not None else None
    group_id = event.group_id or 0
    groups = trace.header.config.get("kv_cache_groups") or [{}]
    block_size = groups[group_id].get("block_size") or len(frame.blocks[0].token_ids)
    table = request.block_ids[group_id] if request is not None else ()
    index = position // block_size
    return table[index] * block_size + position % block_size if index < len(table) else None


def _count(frame: Frame, kind: Any, trace: Trace) -> int:
    return Counter(kind_of(f.event) for f in trace.frames[: frame.seq + 1])[kind]


_BY_KEY: dict[str, Callable[[Frame, Any, Trace], Any]] = {
    "status": _of_request(lambda r: r.status),
    "cpu_block_table": _of_request(lambda r: list(r.cpu_block_ids)),
    "parents": _of_request(lambda r: r.parent_id),
    "num_cached_block": _of_request(lambda r: list(r.num_cached_block)),
    "num_computed_tokens": _of_request(lambda r: r.num_computed_tokens),
    "num_filled": lambda frame, block_id, _: frame.blocks[block_id].num_filled,
    "num_state_tokens": lambda frame, block_id, _: frame.blocks[block_id].num_state_tokens,
    "ref_cnt": lambda frame, block_id, _: frame.blocks[block_id].ref_cnt,
    "cpu_ref_cnt": lambda frame, block_id, _: frame.cpu_blocks[block_id].ref_cnt,
    "slot": _slot,
    "count": _count,
}


def _output_texts(frame: Frame, request_id: str, trace: Trace) -> list[str | None] | None:
    request = frame.request(request_id)
    if request is None:
        return None
    return [trace.header.vocabulary.get(t, f"<{t}>") for t in request.token_ids[request.num_prompt_tokens :]]


def _text(frame: Frame, request_id: str, decode: Decode) -> str | None:
    request = frame.request(request_id)
    return None if request is None else decode(list(request.token_ids[request.num_prompt_tokens :]))


def _block_texts(block: BlockState, trace: Trace) -> list[str | None]:
    return [None if t is None else trace.header.vocabulary.get(t, f"<{t}>") for t in block.token_ids]


def _like(expected: Sequence[str | None], got: Sequence[str | None] | None) -> Any:
    """`got`, with blanks around a text forgiven where nothing else differs: whether a word carries its blank depends on the model."""
    if got is None:
        return None
    texts = list(got)
    for index, (wanted, text) in enumerate(zip(expected, texts, strict=False)):
        if wanted is not None and text is not None and wanted.strip() == text.strip():
            texts[index] = wanted
    return texts


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _ordinal(nth: int) -> str:
    if nth < 0:
        return "last" if nth == -1 else f"{_ordinal(-nth)} last"
    return f"{nth}{'th' if 10 <= nth % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(nth % 10, 'th')}"
