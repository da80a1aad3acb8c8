"""What only the paper's engine has to show: which parts its stage needs, beam candidates, and the swap space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.trace.events import AttentionComputed, BeamsChosen, Event
from engine.trace.frame import Frame, Trace, TraceHeader

ENGINES = {"v1": ("vLLM V1", "vLLM V1's block manager"), "paper": ("paper, 2023", "the block manager of the PagedAttention paper and of vLLM's first release")}


def engine_of(header: TraceHeader) -> str:
    """“paper” or “v1”."""
    return "paper" if header.config.get("engine") == "paper" else "v1"


def engine_header(trace: Trace) -> dict[str, Any]:
    """What the stage's head and layout need to know of the engine: its name, its null block (None: it has none), the scene about the same with the other
    engine, and which parts its foot has: `chains` (the prefix cache), `family` (who was forked from whom), `shares` (where attention goes), `swap`."""
    header = trace.header
    engine = engine_of(header)
    label, title = ENGINES[engine]
    pair = header.scenario.get("pair")
    other = "How vLLM V1 does it" if engine == "paper" else "How the paper does it"
    return {
        "engine": {"id": engine, "label": label, "title": title},
        "null_block": None if engine == "paper" else 0,
        "pair": {"scene": str(pair), "label": other} if pair else None,
        "parts": {
            "chains": engine == "v1" and header.config.get("enable_prefix_caching") is not False,
            "family": engine == "paper" and _has_groups(trace),
            "shares": bool(header.config.get("attention_shares")),
            "swap": bool(header.config.get("num_cpu_blocks")) and engine == "paper",
        },
        "num_cpu_blocks": int(header.config.get("num_cpu_blocks") or 0),
        "prefixes": [str(part.get("id")) for part in _parts(header, "prefixes")],
        "asked": {str(part.get("id")): {name: part.get(name) for name in ("n", "beam_width", "prefix")} for part in _parts(header, "requests")},
        "num_sequences": sum(max(int(part.get("n") or 1), int(part.get("beam_width") or 1)) for part in _parts(header, "requests")),
    }


def _parts(header: TraceHeader, name: str) -> list[Mapping[str, Any]]:
    parts = header.scenario.get(name)
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _has_groups(trace: Trace) -> bool:
    """Whether a request has several sequences or begins with a prefix: by the scenario, or by what is recorded where no scenario tells."""
    if parts := _parts(trace.header, "requests"):
        return any((part.get("n") or 1) > 1 or part.get("beam_width") or part.get("prefix") for part in parts)
    return any(request.sequence_group is not None for frame in trace.frames[-1:] for request in frame.requests)


def beams_of(event: Event) -> dict[str, Any] | None:
    """The candidates of a beam search's selection, best first."""
    if not isinstance(event, BeamsChosen):
        return None
    candidates = [
        {"parent": c.parent_id, "token": c.token_id, "logprob": c.cumulative_logprob, "sequence": c.sequence_id, "finished": c.finished, "forced": c.forced}
        for c in event.candidates
    ]
    return {"group": event.request_id, "width": event.beam_width, "candidates": candidates}


def shares_of(event: Event, frame: Frame) -> dict[str, Any] | None:
    """Where the attention of each request's last query goes: its token, its position, per logical block the physical block and the share (`places`), and for
    each query head its shares of these places (`heads`)."""
    if not isinstance(event, AttentionComputed) or not event.block_shares:
        return None
    shown = []
    by_head = event.head_shares or [[]] * len(event.block_shares)
    for request_id, length, shares, heads in zip(event.request_ids, event.seq_lens, event.block_shares, by_head, strict=False):
        request = frame.request(request_id)
        if request is None or not request.block_ids or not 0 < length <= len(request.token_ids):
            continue
        table = request.block_ids[event.group_id or 0]
        # A window has left the blocks of which the table still names the place only; nothing of the attention goes there.
        places = [[logical, table[logical], share] for logical, share in enumerate(shares) if logical < len(table) and (share or table[logical])]
        own = [[head[logical] for logical, *_ in places] for head in heads]
        shown.append({"request": request_id, "token": request.token_ids[length - 1], "position": length - 1, "places": places, "heads": own})
    return {"layer": event.shares_layer, "requests": shown} if shown else None
