"""Tokenizers: the figures' words are tokens, and every text comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.models import load_tokenizer
from engine.models.tiny_tokenizer import TINY_DIR, build_tokenizer, read_passages
from engine.models.tokenizer import visible

tiny = load_tokenizer("tiny")


def words(text: str) -> list[str]:
    return [tiny.token_text(token) for token in tiny.encode(text)]


@pytest.mark.parametrize(
    "text",
    [
        "Four score and seven years ago our",  # paper figures 3, 5, 6, 7
        "fathers brought forth",
        "mothers",  # figure 8
        "It was the best of times",  # figure 7
        "You only live once",  # figure 3
        "A gentle breeze stirred the leaves as children laughed in the distance",  # vLLM's documentation on prefix caching
        "sea otter => loutre de mer",  # figure 10
    ],
)
def test_every_word_of_the_figures_is_one_token(text: str) -> None:
    assert words(text) == text.split()


def test_signs_and_digits_stand_alone() -> None:
    text = 'of times, it was -- a summer\'s day "cheese" => (so).'
    assert words(text) == ["of", "times", ",", "it", "was", "--", "a", "summer's", "day", '"', "cheese", '"', "=>", "(", "so", ")", "."]
    assert words("-2048") == ["-", "2", "0", "4", "8"]


def test_a_word_is_the_same_token_at_the_start_after_a_space_and_on_a_new_line() -> None:
    (token,) = tiny.encode("our")
    (line_break,) = (each for each in tiny.encode("our\n") if each != token)
    assert tiny.encode("our our\nour") == [token, token, line_break, token]


@pytest.mark.parametrize("mark", ['"', "(", "--"])
def test_a_word_of_the_vocabulary_is_one_token_behind_a_mark_too(mark: str) -> None:
    for word in ("fathers", "loutre", "winter", "so"):
        assert words(f"{mark}{word} {word}") == [mark, word, word]


def test_every_token_of_the_passages_is_a_whole_word_or_sign() -> None:
    for title, text in read_passages().items():
        pieces = "".join(words(text)).replace("⏎", "")
        assert pieces == "".join(text.split()), title
        assert len(tiny.encode(text)) <= len(text.split()) * 2, title


@given(st.text(max_size=80))
def test_any_text_comes_back(text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@given(st.text(alphabet=" \n\t\r▁Ġ<eos>our,", max_size=40))
def test_any_text_of_spaces_line_breaks_and_markers_comes_back(text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text
    assert 0 not in tiny.encode(text)


@given(st.integers(0, tiny.vocab_size - 1))
def test_a_slots_text_is_never_empty_and_shows_no_marker(token: int) -> None:
    text = tiny.token_text(token)
    assert text
    assert "Ġ" not in text
    assert not any(character.isspace() for character in text)


def test_white_space_and_lone_bytes_are_made_visible() -> None:
    assert visible(" word") == "word"
    assert visible(" ") == "␣"
    assert visible("\n\t") == "⏎⇥"
    assert [tiny.token_text(token) for token in tiny.encode("é!")][-1] == "!"
    assert words("你") == ["␣", "<E4>", "<BD>", "<A0>"]


def test_the_end_token_is_the_only_stop_and_cannot_be_typed() -> None:
    assert tiny.stop_token_ids == (0,)
    assert tiny.token_text(0) == tiny.decode([0]) == "<eos>"
    assert 0 not in tiny.encode("once <eos>")


@pytest.mark.parametrize("token", [-1, tiny.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidInput, match=f"Token {token} is outside the vocabulary"):
        tiny.token_text(token)
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        tiny.decode([5, token])


def test_the_file_in_the_repository_is_what_the_script_builds() -> None:
    kept = json.loads((TINY_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    built = json.loads(build_tokenizer().to_str())
    for part in ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens"):
        assert kept[part] == built[part]
    assert tiny.vocab_size < 4096


def test_transformers_reads_the_same_tokens() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(TINY_DIR, local_files_only=True)
    for text in ["Four score and seven years ago our", "a <eos> b\n\nc", 'Translate English to French:\n"cheese" =>']:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tiny.encode(text)
        assert theirs.decode(tiny.encode(text)) == text


def test_loading_needs_no_torch() -> None:
    """A screen shows the first frames before torch is there."""
    code = (
        "from engine.models import list_models, load_tokenizer\n"
        "list_models(); load_tokenizer('tiny').encode('Four score')\n"
        "import sys; print([name for name in ('torch', 'transformers', 'gguf', 'numpy') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
