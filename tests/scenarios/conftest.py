"""A small vocabulary of whole words, so that most tests of scenarios need no model."""

from __future__ import annotations

import re

import pytest

WORDS = ["<eos>", "Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth", "on", "this", ","]
NUM_IDS = 10_000


class WordTokenizer:
    """One token per word of `WORDS`, letters one by one for anything else; ids up to `NUM_IDS` are valid and called t<id>."""

    vocab_size = NUM_IDS
    stop_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.findall(r"\w+|[^\w\s]", text):
            ids += [WORDS.index(piece)] if piece in WORDS else [1000 + ord(letter) % 5000 for letter in piece]
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        return "".join(self.token_text(i) if self.token_text(i) == "," else f" {self.token_text(i)}" for i in ids)

    def token_text(self, token_id: int) -> str:
        return WORDS[token_id] if token_id < len(WORDS) else f"t{token_id}"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> WordTokenizer:
    """Scenarios without a model are read with `WordTokenizer`."""
    tokenizer = WordTokenizer()
    monkeypatch.setattr("scenarios.runner.load_tokenizer", lambda name: tokenizer)
    return tokenizer
