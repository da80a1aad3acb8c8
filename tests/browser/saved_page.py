"""A page with a trace inside it, as an exported file is one: the drawing code alone, without Streamlit and without a server."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Page

from engine.trace.frame import Trace
from views.stage import script, style
from views.stage.payload import build_payload


def save(trace: Trace, folder: Path) -> str:
    """Write the page and return its address."""
    data = json.dumps({"trace_id": "saved", **build_payload(trace)}).replace("<", "\\u003c")
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset='utf-8'><style>body {{ margin: 0 }} {style()}</style><div class='stage-root'></div>"
        f"<script type='module'>{script()}\nmountStage(document.querySelector('.stage-root'), {{}}).update({data});</script>",
        encoding="utf-8",
    )
    return page.as_uri()


def go_to(page: Page, kind: str, trace: Trace, nth: int = 0) -> int:
    """Put the cursor on the nth event of a kind, by the address of the page. Returns its frame's number."""
    seq = [f.seq for f in trace.frames if f.event.__struct_config__.tag == kind][nth]
    page.goto(f"{page.url.partition('?')[0]}?step={seq}")
    return seq
