"""`python -m engine.models`: what it prints, and exit codes 0 and 2."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from engine.models.__main__ import main, show_progress
from engine.models.terms import GEMMA_TERMS


def test_list_names_all_models_and_the_way_to_the_one_that_is_not_here(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "tiny " in out
    assert "tiny-swa " in out
    assert "get it: python -m engine.models pull smollm2-135m" in out


def test_list_as_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["installed"], model["licence"]) for model in models] == [
        ("tiny", True, "Apache-2.0"),
        ("tiny-swa", True, "Apache-2.0"),
        ("tiny-hybrid", True, "Apache-2.0"),
        ("smollm2-135m", False, "Apache-2.0"),
        ("gemma3-270m", False, "Gemma Terms of Use"),
    ]
    assert [model["terms_address"] for model in models if model["terms_address"]] == ["https://ai.google.dev/gemma/terms"]


@pytest.mark.parametrize(
    ("name", "says"), [("tiny", "by heart"), ("tiny-swa", "sliding window"), ("tiny-hybrid", "recurrent state"), ("smollm2-135m", "Apache-2.0")]
)
def test_cards(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", name]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["pull", "gpt-17"], ["card", "gpt-17"], ["train", "tiny", "--steps", "0"]])
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_bad_usage_is_exit_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "smollm2-135m"])
    assert caught.value.code == 2


def test_an_interrupted_pull_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import engine.models.pull as module

    def interrupted(name: str, progress: object, accept: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "pull", interrupted)
    assert main(["pull", "smollm2-135m"]) == 2
    assert "goes on where this one stopped" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What came of the question, instead of a pull."""
    import engine.models.pull as module

    answers: list[bool] = []
    monkeypatch.setattr(module, "pull", lambda name, progress, accept: answers.append(accept(GEMMA_TERMS)))
    return answers


@pytest.mark.parametrize(
    ("stdin", "arguments", "accepted"),
    [
        (Terminal("yes\n"), [], True),
        (Terminal("no\n"), [], False),
        (Terminal("y\n"), [], False),
        (Terminal(""), [], False),
        (io.StringIO("yes\n"), [], False),  # nobody sits there
        (io.StringIO(""), ["--accept-licence"], True),
    ],
)
def test_terms_are_shown_and_wait_for_a_yes(
    stdin: io.StringIO, arguments: list[str], accepted: bool, asked: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["pull", "gemma3-270m", *arguments]) == 0
    assert asked == [accepted]
    shown = capsys.readouterr().out
    assert "Gemma Terms of Use: https://ai.google.dev/gemma/terms" in shown
    assert GEMMA_TERMS.meaning in shown


def test_a_refusal_is_one_sentence_and_fetches_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["pull", "gemma3-270m"]) == 2
    assert capsys.readouterr().err == (
        "The Gemma Terms of Use were not accepted, so nothing was fetched: read https://ai.google.dev/gemma/terms, "
        "then run `python -m engine.models pull gemma3-270m --accept-licence`.\n"
    )
    assert not cache.exists()


def test_progress_away_from_a_terminal_is_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = show_progress()
    for done in range(0, 1001):
        progress(done * 1000, 1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0].endswith("0 %")
    assert lines[-1].endswith("100 %")
