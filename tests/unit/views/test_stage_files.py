"""The stage is joined from files without a build step: none may be forgotten, and none may name a file that is not there."""

from __future__ import annotations

from pathlib import Path

from views import stage

FOLDER = Path(stage.__file__).parent


def test_every_script_and_style_sheet_is_joined_once() -> None:
    """All but `component.js`, which mounts the stage in Streamlit and stays out of a saved page."""
    assert sorted([*stage.SCRIPTS, "component.js"]) == sorted(p.name for p in FOLDER.glob("*.js"))
    assert sorted(stage.STYLES) == sorted(p.name for p in FOLDER.glob("*.css"))


def test_the_joined_sheet_has_every_rule_and_what_narrow_windows_change_comes_last() -> None:
    sheet = stage.style()
    assert all((FOLDER / name).read_text(encoding="utf-8") in sheet for name in stage.STYLES)
    assert sheet.rindex("@container") > max(sheet.index(f".{part} ") for part in ("cell", "request", "group-box", "events", "foot"))
