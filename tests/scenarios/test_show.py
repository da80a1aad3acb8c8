"""`show`: a trace file is read back as it ran, and a damaged one ends in one sentence and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scenarios.__main__ import main

SCENE = """
id: dictated
title: Dictated
source: a test
goal: See a trace come back.
model: none
config: {num_blocks: 9, block_size: 4}
requests:
  - {id: A, prompt_token_ids: [10, 11, 12, 13, 14], max_tokens: 1, force: [15]}
notes:
  - {at: {kind: request_added, request: A}, say: "A arrives."}
"""


@pytest.fixture
def trace_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "dictated.yaml").write_text(SCENE, encoding="utf-8")
    assert main(["run", str(tmp_path / "dictated.yaml"), "--trace", str(tmp_path / "t.json")]) == 0
    return tmp_path / "t.json"


def test_show_prints_what_run_printed(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = capsys.readouterr().out.splitlines()
    assert main(["show", str(trace_file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "A arrives." in "\n".join(shown)
    assert shown == ran[2 : 2 + len(shown)]


def test_a_trace_cut_in_half(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = trace_file.read_bytes()
    trace_file.write_bytes(data[: len(data) // 2])
    assert main(["show", str(trace_file)]) == 2
    assert capsys.readouterr().err.startswith("t.json is not a whole trace: ")


def test_a_trace_from_another_version(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(trace_file.read_bytes())
    trace_file.write_text(json.dumps({**data, "version": 7}), encoding="utf-8")
    assert main(["show", str(trace_file)]) == 2
    assert "t.json is a trace of version 7, but this Pagewalk reads version 4" in capsys.readouterr().err


def test_notes_of_a_damaged_header_are_passed_over(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(trace_file.read_bytes())
    data["header"]["scenario"]["resolved_notes"] = {"x": 1}
    trace_file.write_text(json.dumps(data), encoding="utf-8")
    assert main(["show", str(trace_file)]) == 0


def test_a_file_of_another_kind_is_said_to_be_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text("# Notes", encoding="utf-8")
    assert main(["show", str(tmp_path / "notes.md")]) == 2
    assert capsys.readouterr().err.startswith("notes.md is not a whole trace: JSON is malformed: ")
