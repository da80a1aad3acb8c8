"""What the stage needs to draw a trace, as plain JSON-ready data. Pure: no Streamlit, no engine but its traces.

Neighbouring frames share what did not change, so distinct block and request states stand once in a table and frames hold indices into it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from engine.trace.events import AttentionComputed, BlocksAllocated, BlocksFreed, BlocksTouched, Event, SlotsMapped, kind_of
from engine.trace.frame import BlockState, Frame, RequestState, Trace
from views.narration import narrate
from views.narration.sentences import agreement

PAYLOAD_VERSION = 1
ENDS = ("engine_failed", "recording_stopped")
"""Kinds after which nothing more is recorded although the run did not come to its own end."""


def build_payload(trace: Trace, *, start: int = 0) -> dict[str, Any]:
    """The frames from index `start` on, with the header, the author's notes and the vocabulary. Notes and token texts may grow, so all are sent.


    `start` beyond the end gives no frames. The result contains only dict, list, str, int, float, bool and None. Changes nothing.
    """
    frames = list(trace.frames)  # a live run may append meanwhile
    start = min(max(start, 0), len(frames))
    blocks: _Table = _Table()
    requests: _Table = _Table()
    sent: list[dict[str, Any]] = []
    agreed = _agreement_before(frames, start)
    for index in range(start, len(frames)):
        frame = frames[index]
        if isinstance(frame.event, AttentionComputed):
            agreed = agreement(frame.event) or agreed
        sent.append(_frame(trace, frame, frames[index - 1] if index else None, blocks, requests, agreed))
    return {
        "version": PAYLOAD_VERSION,
        "start": start,
        "complete": trace.complete or bool(frames and kind_of(frames[-1].event) in ENDS),
        "header": _header(trace),
        "notes": {str(seq): str(text) for seq, text in (trace.header.scenario.get("resolved_notes") or {}).items()},
        "vocabulary": {str(token_id): text for token_id, text in trace.header.vocabulary.copy().items()},
        "blocks": blocks.rows,
        "requests": requests.rows,
        "frames": sent,
    }


class _Table:
    """Distinct values in order of first use. Objects are recognised by identity first (frames share them), then by value."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._by_id: dict[int, int] = {}
        self._by_value: dict[Hashable, int] = {}
        self._kept: list[object] = []

    def index(self, value: BlockState | RequestState, row: dict[str, Any] | None = None) -> int:
        known = self._by_id.get(id(value))
        if known is not None:
            return known
        index = self._by_value.get(value)
        if index is None:
            index = self._by_value[value] = len(self.rows)
            self.rows.append(row if row is not None else _plain(value))
        self._by_id[id(value)] = index
        self._kept.append(value)  # an id is only unique while its object lives
        return index


def _plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))  # lists instead of tuples, as the browser will see it


def _header(trace: Trace) -> dict[str, Any]:
    header = trace.header
    scenario, config = header.scenario, header.config
    model = str(header.model.get("name", "none"))
    num_blocks = int(config.get("num_blocks") or (len(trace.frames[0].blocks) if trace.frames else 0))
    about = "no model, bookkeeping only" if model == "none" else model
    return {
        "title": str(scenario.get("title") or scenario.get("id") or "A run"),
        "goal": str(scenario.get("goal") or ""),
        "source": str(scenario.get("source") or ""),
        "model": model,
        "backend": str(header.backend.get("name", "none")),
        "block_size": int(config.get("block_size") or 1),
        "num_blocks": num_blocks,
        "about": f"{about} · block size {config.get('block_size')} · {num_blocks - 1} blocks + null",
        "seed": header.seed,
    }


def _frame(trace: Trace, frame: Frame, previous: Frame | None, blocks: _Table, requests: _Table, agreed: str | None) -> dict[str, Any]:
    said = narrate(trace.header, frame, previous)
    event = frame.event
    return {
        "seq": frame.seq,
        "step": frame.step,
        "op": frame.op,
        "op_index": frame.op_index,
        "kind": said.kind,
        "request": event.request_id,
        "forced": event.cause.kind.value == "forced",
        "say": {"text": said.text, "why": said.why, "symbol": said.symbol, "rule": said.rule},
        "blocks": [blocks.index(b) for b in frame.blocks],
        "queue": list(frame.free_queue),
        "requests": [requests.index(r) for r in frame.requests],
        "running": list(frame.running),
        "waiting": list(frame.waiting),
        "now": _now(event),
        "slots": _slots(event),
        "chains": _chains(frame),
        "agreed": agreed,
        "counters": _plain(frame.counters),
    }


def _now(event: Event) -> dict[str, Any]:
    """What just moved: the blocks to ring, and how the free queue changed, in words."""
    names = ("block_ids", "destination_block_ids")
    ids = [b for name in names for b in getattr(event, name, [])]
    single = getattr(event, "block_id", None)
    if single is not None:
        ids.append(single)
    now: dict[str, Any] = {"blocks": ids, "left_queue": [], "joined_queue": [], "queue_text": ""}
    if isinstance(event, BlocksAllocated):
        now["left_queue"] = list(event.block_ids)
        now["queue_text"] = f"popped from the head, given to {event.request_id}" if event.request_id else "popped from the head by the scenario"
    elif isinstance(event, BlocksTouched):
        now["left_queue"] = list(event.left_free_queue)
        if event.left_free_queue:
            now["queue_text"] = f"taken out of the middle: a prefix-cache hit of {event.request_id}"
    elif isinstance(event, BlocksFreed):
        now["blocks"] = [*event.prepended, *event.appended, *event.still_referenced]
        now["joined_queue"] = [*event.prepended, *event.appended]
        parts = []
        if event.prepended:
            parts.append("put at the head" if event.cause.kind.value == "prepared" else "no hash: put at the head")
        if event.appended:
            parts.append("hashed: put at the tail")
        now["queue_text"] = "; ".join(parts)
    return now


def _slots(event: Event) -> dict[str, Any] | None:
    if not isinstance(event, SlotsMapped):
        return None
    return {"request": event.request_id, "positions": list(event.positions), "slots": list(event.slots), "token_ids": list(event.token_ids)}


def _chains(frame: Frame) -> list[dict[str, Any]]:
    """The prefix cache in order of insertion: each hash with its blocks and its parent, as far as a request still knows the chain."""
    parents: dict[str, str | None] = {}
    for request in frame.requests:
        for index, digest in enumerate(request.block_hashes):
            parents[digest] = request.block_hashes[index - 1] if index else None
    nodes = []
    for key, block_ids in frame.hash_map:
        digest = key.rpartition(":")[0] or key
        nodes.append({"hash": digest, "parent": parents.get(digest), "known": digest in parents, "blocks": list(block_ids)})
    return nodes


def _agreement_before(frames: list[Frame], start: int) -> str | None:
    for frame in reversed(frames[:start]):
        if isinstance(frame.event, AttentionComputed) and (text := agreement(frame.event)):
            return text
    return None
