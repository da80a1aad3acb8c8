"""What the scenario's author says beside the events: notes, which of them no source confirms, and corrections of what people may have read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.trace.frame import TraceHeader


def lessons_of(header: TraceHeader) -> dict[str, Any]:
    """`notes` (frame -> text), `unconfirmed` (frames whose note names a value that no source confirms), `corrections` (frame -> what a text says, what
    really happens, the rule). Frames are named by their seq, as texts."""
    scenario = header.scenario
    notes = scenario.get("resolved_notes")
    corrections = scenario.get("resolved_corrections")
    return {
        "notes": {str(seq): str(text) for seq, text in notes.items()} if isinstance(notes, Mapping) else {},
        "unconfirmed": [int(seq) for seq in scenario.get("unconfirmed_notes") or []],
        "corrections": {str(seq): [_correction(c) for c in found] for seq, found in corrections.items()} if isinstance(corrections, Mapping) else {},
    }


def _correction(correction: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(correction.get(name) or "") for name in ("read", "really", "rule")}
