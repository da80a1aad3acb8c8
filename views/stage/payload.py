"""What the stage needs to draw a trace, as plain JSON-ready data. Pure: no Streamlit, no engine but its traces.

Neighbouring frames share what did not change, so distinct block and request states and worker rows stand once in a table and frames hold indices into it. The
first frame of a portion has all of its blocks, its free queue and its prefix cache; a later one only what is different from the frame before.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from engine.trace.events import AttentionComputed, GroupLookup, PrefixLookup, SlotsMapped, kind_of
from engine.trace.frame import BlockState, Counters, Frame, RequestState, Trace, TraceHeader, WorkerRow
from views.narration import narrate
from views.narration.groups import Group, groups_of, hash_block_size_of
from views.narration.sentences import agreement
from views.narration.stops import stop_words, stop_words_at
from views.narration.words import Words, listed
from views.stage.changes import cache_changes, changed_blocks, queue_change, whole_cache
from views.stage.lessons import lessons_of
from views.stage.moves import copies_under_way, moves_of, next_copies
from views.stage.paper_parts import beams_of, engine_header, engine_of, shares_of
from views.stage.worker_rows import RowsOnStage

PAYLOAD_VERSION = 3
ENDS = ("engine_failed", "recording_stopped")
"""Kinds after which nothing more is recorded although the run did not come to its own end."""


def build_payload(trace: Trace, *, start: int = 0) -> dict[str, Any]:
    """The frames from index `start` on, with the header, the author's notes and corrections and the vocabulary. Notes and token texts may grow, so all are
    sent.

    `start` beyond the end gives no frames. The result contains only dict, list, str, int, float, bool and None. Changes nothing.
    """
    frames = list(trace.frames)  # a live run may append meanwhile
    start = min(max(start, 0), len(frames))
    portion = _Portion(trace.header, frames, start)
    sent = [portion.frame(index) for index in range(start, len(frames))]
    return {
        "version": PAYLOAD_VERSION,
        "start": start,
        "complete": trace.complete or bool(frames and kind_of(frames[-1].event) in ENDS),
        "header": _header(trace),
        **lessons_of(trace.header),
        "vocabulary": {str(token_id): text for token_id, text in trace.header.vocabulary.copy().items()},
        "blocks": portion.blocks.rows,
        "requests": portion.requests.rows,
        "rows": portion.rows.rows,
        "row_notes": portion.row_notes.distinct,
        "frames": sent,
    }


class _Table:
    """Distinct values in order of first use. Objects are recognised by identity first (frames share them), then by value."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._by_id: dict[int, int] = {}
        self._by_value: dict[Hashable, int] = {}
        self._kept: list[object] = []

    def index(self, value: BlockState | RequestState | WorkerRow) -> int:
        known = self._by_id.get(id(value))
        if known is not None:
            return known
        index = self._by_value.get(value)
        if index is None:
            index = self._by_value[value] = len(self.rows)
            self.rows.append(self._row(value, index))
        self._by_id[id(value)] = index
        self._kept.append(value)  # an id is only unique while its object lives
        return index

    def _row(self, value: Any, index: int) -> dict[str, Any]:
        row: dict[str, Any] = _plain(value)
        return row


class _RequestTable(_Table):
    """Requests change a little at a time while their lists grow: a row after the first of a request names an earlier row as its `base` and holds only what
    differs; a list that became longer stands under `more`, without its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[int, dict[str, Any]]] = {}

    def _row(self, value: Any, index: int) -> dict[str, Any]:
        whole: dict[str, Any] = _plain(value)
        base, before = self._last.get(value.request_id, (None, {}))
        self._last[value.request_id] = (index, whole)
        if base is None:
            return whole
        row: dict[str, Any] = {"base": base, "more": {}}
        for name, new in whole.items():
            old = before[name]
            if name in ("token_ids", "block_hashes") and len(new) > len(old) and new[: len(old)] == old:
                row["more"][name] = new[len(old) :]
            elif new != old:
                row[name] = new
        return row


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))  # lists instead of tuples, as the browser will see it


def _header(trace: Trace) -> dict[str, Any]:
    header = trace.header
    scenario, config = header.scenario, header.config
    model = str(header.model.get("name", "none"))
    num_blocks = int(config.get("num_blocks") or (len(trace.frames[0].blocks) if trace.frames else 0))
    about = "no model, bookkeeping only" if model == "none" else model
    groups = groups_of(header)
    engine = engine_header(trace)
    pool = f"{num_blocks} blocks" if engine["null_block"] is None else f"{num_blocks - 1} blocks + null"
    swap = [f"{engine['num_cpu_blocks']} CPU blocks"] if engine["num_cpu_blocks"] else []
    names = {"size": "decode_context_parallel_size", "rank": "dcp_rank", "interleave": "cp_kv_cache_interleave_size"}
    ranks = {short: int(config.get(name) or (0 if short == "rank" else 1)) for short, name in names.items()}
    return {
        "title": str(scenario.get("title") or scenario.get("id") or "A run"),
        "goal": str(scenario.get("goal") or ""),
        "source": str(scenario.get("source") or ""),
        "model": model,
        "backend": str(header.backend.get("name", "none")),
        "block_size": int(config.get("block_size") or 1),
        "hash_block_size": hash_block_size_of(header),
        "caching": config.get("enable_prefix_caching") is not False,
        "num_blocks": num_blocks,
        "groups": [{"label": g.label, "title": g.title, "block_size": g.block_size, "is_state": g.is_state} for g in groups],
        "ranks": ranks,
        "about": " · ".join([about, _sizes(groups), pool, *swap]),
        "seed": header.seed,
        "other_window": _other_window(header),
        "opens": scenario.get("opens"),
        **engine,
    }


def _other_window(header: TraceHeader) -> dict[str, str] | None:
    """A chip for a run whose sliding-window layers see another window than the model's own, None for every other run."""
    window, own = header.config.get("sliding_window"), header.model.get("sliding_window")
    if window is None or own is None or window == own:
        return None
    name = header.model.get("name")
    title = f"{name} was trained with a window of {own} tokens. This run gives it one of {window}, so that other blocks fall out, and its text may suffer"
    return {"text": f"window {window}, not {own}: the text may suffer", "title": title}


def _sizes(groups: list[Group]) -> str:
    sizes = {group.block_size for group in groups}
    if len(groups) == 1:
        return f"block size {groups[0].block_size}"
    return f"{len(groups)} groups, block size {listed(sorted(sizes))}"


class _Portion:
    """The frames of one portion, made in order: each remembers the one before."""

    def __init__(self, header: TraceHeader, frames: list[Frame], start: int) -> None:
        self.blocks, self.requests, self.rows = _Table(), _RequestTable(), _Table()
        self._header, self._frames, self._start = header, frames, start
        self._null_block = None if engine_of(header) == "paper" else 0
        self._caching = header.config.get("enable_prefix_caching") is not False
        self._agreed = _agreement_before(frames, start)
        self._copies = copies_under_way(frames, start)
        self.row_notes = RowsOnStage(header, frames[:start])
        self._counters_of: Counters | None = None
        self._sent: dict[str, Any] = {}

    def frame(self, index: int) -> dict[str, Any]:
        frame, previous = self._frames[index], self._frames[index - 1] if index else None
        event = frame.event
        if isinstance(event, AttentionComputed):
            self._agreed = agreement(event) or self._agreed
        self._copies = next_copies(self._copies, event)
        said = narrate(self._header, frame, previous)
        return {
            "seq": frame.seq,
            "step": frame.step,
            "op": frame.op,
            "op_index": frame.op_index,
            "kind": said.kind,
            "request": event.request_id,
            "group": event.group_id,
            "say": {"text": said.text, "why": said.why, "symbol": said.symbol, "rule": said.rule},
            "now": moves_of(event, self._null_block, self._caching),
            "slots": _slots(event),
            "lookup": _lookup(self._header, frame, previous) if isinstance(event, PrefixLookup) else None,
            **self._asked_for(frame),
            **self._standing(frame, previous),
            **self._pool(frame, previous if index > self._start else None),
        }

    def _asked_for(self, frame: Frame) -> dict[str, Any]:
        """Beam candidates and attention shares, where the event has some."""
        found = {"beams": beams_of(frame.event), "shares": shares_of(frame.event, frame)}
        return {name: value for name, value in found.items() if value is not None}

    def _standing(self, frame: Frame, previous: Frame | None) -> dict[str, Any]:
        """What often stays as it is; only what differs from the frame sent before is in the result."""
        standing = {
            "requests": [self.requests.index(r) for r in frame.requests],
            "rows": [self.rows.index(r) for r in frame.rows],
            "running": list(frame.running),
            "waiting": list(frame.waiting),
            "swapped": list(frame.swapped),
            "copies": self._copies,
            "agreed": self._agreed,
            **self.row_notes.at(frame, previous),
        }
        if self._counters_of is not frame.counters and self._counters_of != frame.counters:
            standing["counters"] = _plain(frame.counters)
        self._counters_of = frame.counters
        different = {name: value for name, value in standing.items() if name not in self._sent or self._sent[name] != value}
        self._sent.update(different)
        return different

    def _pool(self, frame: Frame, previous: Frame | None) -> dict[str, Any]:
        """Blocks, free queue and prefix cache: whole without a `previous` frame, else only what changed."""
        if previous is None:
            whole = {"blocks": [self.blocks.index(b) for b in frame.blocks], "queue": list(frame.free_queue), "cache": whole_cache(frame.hash_map)}
            if frame.cpu_blocks:
                whole |= {"cpu_blocks": [self.blocks.index(b) for b in frame.cpu_blocks], "cpu_queue": list(frame.cpu_free_queue)}
            return whole
        different: dict[str, Any] = {}
        if blocks := changed_blocks(frame.blocks, previous.blocks):
            different["changed"] = [[block.block_id, self.blocks.index(block)] for block in blocks]
        if queue := queue_change(frame.free_queue, previous.free_queue):
            different["queue_change"] = queue
        if cache := cache_changes(frame, previous):
            different["cache_changes"] = cache
        if blocks := changed_blocks(frame.cpu_blocks, previous.cpu_blocks):
            different["cpu_changed"] = [[block.block_id, self.blocks.index(block)] for block in blocks]
        if queue := queue_change(frame.cpu_free_queue, previous.cpu_free_queue):
            different["cpu_queue_change"] = queue
        return different


def _slots(event: Any) -> dict[str, Any] | None:
    if not isinstance(event, SlotsMapped):
        return None
    positions, slots, token_ids = list(event.positions), list(event.slots), list(event.token_ids)
    rank = event.cause.facts.get("dcp_rank")
    return {
        "request": event.request_id,
        "group": event.group_id or 0,
        "rank": rank if isinstance(rank, int) else None,
        "positions": positions,
        "slots": slots,
        "token_ids": token_ids,
    }


def _lookup(header: TraceHeader, frame: Frame, previous: Frame | None) -> dict[str, Any] | None:
    """What a lookup found in each group, logical block by logical block, why no more, and what lies behind: `stops` as [logical index, block id, reason]."""
    event = frame.event
    if not isinstance(event, PrefixLookup):
        return None
    words = Words(header, frame, previous)
    num_null = -(-event.num_hit_tokens // words.block_size(0)) - len(event.hit_block_ids)  # `hit_block_ids` leaves null blocks out, and they come first
    alone = GroupLookup(0, event.num_hit_tokens, [*[0] * num_null, *event.hit_block_ids], event.cause, event.stops)
    groups = [
        {
            "group": g.group_id,
            "tokens": g.num_hit_tokens,
            "blocks": list(g.block_ids),
            "stop": stop_words(words, g.cause),
            "stops": [[s.logical_index, s.block_id, stop_words_at(words, s.cause, s.logical_index)] for s in g.stops],
        }
        for g in event.groups or [alone]
    ]
    return {"request": event.request_id, "tokens": event.num_hit_tokens, "junction": event.junction, "groups": groups}


def _agreement_before(frames: list[Frame], start: int) -> str | None:
    for frame in reversed(frames[:start]):
        if isinstance(frame.event, AttentionComputed) and (text := agreement(frame.event)):
            return text
    return None
