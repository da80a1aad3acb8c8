"""``python -m scenarios``: what it prints and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.trace.codec import load
from engine.trace.events import EngineFailed
from scenarios import load_scenario
from scenarios.__main__ import main
from scenarios.loader import library_files
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.test_bad_input import GOOD

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path, words: WordTokenizer) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return str(path)


def variant(good: str, old: str, new: str) -> str:
    assert old in GOOD
    path = Path(good).with_name("variant.yaml")
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    return str(path)


def test_list_names_every_scene(capsys: Capture) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^figure-6-v1 +vllm    Figure 6 as vLLM V1 does it$", out, re.MULTILINE)
    assert all(re.search(rf"^{re.escape(scene)} ", out, re.MULTILINE) for scene in library_files())
    assert "Kwon et al. 2023, Figure 7" in out


def test_schema_is_json_schema(capsys: Capture) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"id", "title", "source", "goal", "config", "requests"}


def test_run_prints_one_line_per_frame_with_notes_and_outputs(good: str, capsys: Capture) -> None:
    assert main(["run", good]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["A title (somewhere)", "See something."]
    assert lines[-2:] == ["A: ' fathers brought' (FINISHED_LENGTH_CAPPED)", "all 1 expected facts hold"]
    frames = [line for line in lines[2:-2] if not line.startswith("      │")]
    assert [int(line.split()[0]) for line in frames] == list(range(len(frames)))
    allocated = next(line for line in frames if "blocks_allocated" in line)
    assert "step 1" in allocated
    assert "block_ids=[1, 2]" in allocated
    assert "(head_of_free_queue: " in allocated
    assert lines[next(i for i, line in enumerate(lines) if "prefix_lookup" in line) + 1] == "      │ A sentence."


def test_run_json_prints_the_final_state_in_the_recorded_runs_names(good: str, capsys: Capture) -> None:
    """R1.7: freed from the tail on, the unhashed block in front; prompt 7 and 2 outputs fill block 2, so both blocks are hashed and go to the tail."""
    assert main(["run", good, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["state"] == {
        "free": [3, 4, 5, 6, 7, 8, 2, 1],
        "num_free": 8,
        "usage": 0.0,
        "ref": {},
        "hash": {"1": "A@4", "2": "A@8"},
        "hash_tokens": {"1": 4, "2": 8},
        "map": {"A@4": 1, "A@8": 2},
        "requests": {},
    }
    assert summary["outputs"]["A"]["text"] == " fathers brought"
    assert summary["outputs"]["A"]["forced_positions"] == [7, 8]
    assert summary["failures"] == []
    assert summary["error"] is None


def test_until_stops_at_a_frame_and_checks_nothing(good: str, capsys: Capture, tmp_path: Path) -> None:
    wrong = variant(good, "[3, 4, 5, 6, 7, 8, 2, 1]", "[5]")
    out = tmp_path / "part.json"
    assert main(["run", wrong, "--until", "6", "--trace", str(out)]) == 0
    assert "stopped at frame 6: expectations were not checked" in capsys.readouterr().out
    trace = load(out)
    assert [f.seq for f in trace.frames] == list(range(7))
    assert not trace.complete


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_trace_is_written_and_can_be_read(good: str, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    assert main(["run", good, "--trace", str(out)]) == 0
    trace = load(out)
    assert trace.complete
    assert trace.header.scenario["id"] == "scene"


def test_failed_expectation_exits_1_and_names_it(good: str, capsys: Capture) -> None:
    wrong = variant(good, "[3, 4, 5, 6, 7, 8, 2, 1]", "[1]")
    expected = f"{wrong}:16: expect[0].free_queue: the end (frame "
    for command in (["run", wrong], ["check", wrong], ["run", wrong, "--json"]):
        assert main(command) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(expected)
        assert printed.err.endswith("): expected free_queue [1], got [3, 4, 5, 6, 7, 8, 2, 1]\n")
        assert printed.err.count("\n") == 1
        assert "hold" not in printed.out


def test_invalid_scenario_exits_2_with_every_problem(good: str, capsys: Capture) -> None:
    bad = variant(good, "num_blocks: 9, block_size: 4", "num_blocks: 0, block_size: 0")
    for command in (["run", bad], ["check", bad]):
        assert main(command) == 2
        assert capsys.readouterr().err == (
            f"{bad}:6: config.num_blocks: this is 0, but it must be at least 2; give a larger number\n"
            f"{bad}:6: config.block_size: this is 0, but it must be at least 1; give a larger number\n"
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "figure-9999"], "there is no scene “figure-9999”: "),
        (["check", "figure6"], "there is no scene “figure6”: did you mean “figure-6”? "),
        (["run", "figure-6", "--model", "no-such-model"], ""),
        (["run", "figure-6", "--backend", "cuda"], "there is no backend “cuda”: choose one of triton, interpret, torch"),
        (["run", "missing.yaml"], "missing.yaml: the file cannot be read (no such file or directory); check the path"),
    ],
    ids=str,
)
def test_what_is_not_there_exits_2_with_one_sentence(arguments: list[str], sentence: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(sentence)
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run"], ["run", "figure-6", "--until", "-1"], ["run", "figure-6", "--until", "x"]], ids=str)
def test_wrong_usage_exits_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m scenarios" in capsys.readouterr().err


def test_engine_error_exits_3_and_the_trace_is_written_all_the_same(good: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("the sampler refused to go on")

    monkeypatch.setattr("engine.bookkeeping.BookkeepingRunner._sample", fail)
    out = tmp_path / "out.json"
    for command in (["run", good, "--trace", str(out)], ["check", good]):
        assert main(command) == 3
        assert capsys.readouterr().err == "the sampler refused to go on\n"
    trace = load(out)
    assert isinstance(trace.frames[-1].event, EngineFailed)
    assert len(trace.frames) > 5
    assert not trace.complete


def test_trace_that_cannot_be_written_exits_2(good: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", good, "--trace", str(tmp_path / "nowhere" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_check_of_several_reports_all_and_exits_with_the_gravest(good: str, capsys: Capture) -> None:
    wrong = variant(good, "[3, 4, 5, 6, 7, 8, 2, 1]", "[1]")
    assert main(["check", wrong, good, "no-such-scene"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("scene: all 1 expected facts hold (")
    assert printed.out.count("\n") == 1
    assert len(printed.err.splitlines()) == 2
    assert main(["check", good, wrong]) == 1


def test_check_runs_the_whole_library_and_names_what_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("PAGEWALK_CACHE", str(tmp_path))
    assert main(["check"]) == 0
    shown = capsys.readouterr().out
    assert "figure-6: all " in shown
    command = "`python -m engine.models pull gemma3-270m`"
    assert f"gemma-window: not checked, because gemma3-270m is not installed; {command} fetches it" in shown
    assert main(["check", "gemma-window"]) == 2
    assert command in capsys.readouterr().err


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "scenarios"]
    out = tmp_path / "figure-6.json.gz"
    done = subprocess.run([*command, "run", "figure-6", "--trace", str(out)], capture_output=True, text=True, cwd=root, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "block_ids=[7, 1]" in done.stdout
    assert load(out).header.scenario["id"] == load_scenario("figure-6").id
    done = subprocess.run([*command, "run", "figure-7.yml"], capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "figure-7.yml: the file cannot be read (no such file or directory); check the path\n"
