"""The animated stage: one Streamlit component that draws a trace. This module only mounts it; `payload` makes its data, the scripts draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPTS = (
    "util.js", "recording.js", "transport.js", "draw_cell.js", "draw_pool.js", "draw_queue.js", "draw_lanes.js", "draw_groups.js", "draw_requests.js",
    "draw_worker_rows.js", "draw_beams.js", "draw_events.js", "draw_chains.js", "draw_family.js", "draw_shares.js", "draw_swap.js", "draw_lessons.js",
    "stage.js",
)  # fmt: skip
"""In the order in which they are joined to one module. They share one scope and import nothing, so that a saved page can carry them as they are."""

STYLES = ("stage.css", "pool.css", "requests.css", "worker_rows.css", "beams.css", "events.css", "below.css", "narrow.css")
"""In the order in which they are joined to one style sheet: where two rules weigh the same, the later one wins."""

_FOLDER = Path(__file__).parent


def script() -> str:
    """The stage's drawing code: defines ``mountStage(element, hooks)``, exports nothing."""
    return _joined(SCRIPTS)


def style() -> str:
    """The stage's style sheet; follows `data-theme` on the stage's element."""
    return _joined(STYLES)


def make_stage() -> Callable[..., Any]:
    """The component, ready to be mounted: ``stage(data=payload, key=..., on_need_change=...)``.

    The trigger ``need`` carries ``{"have": number of frames that the browser holds, "trace_id": ...}``.
    """
    import streamlit as st

    component = (_FOLDER / "component.js").read_text(encoding="utf-8")
    renderer: Callable[..., Any] = st.components.v2.component(
        "pagewalk_stage", html='<div class="stage-root"></div>', css=style(), js=f"{script()}\n{component}"
    )
    return renderer


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)
