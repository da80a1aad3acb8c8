"""Text to token ids and back, without torch: what screens, scenarios and the engine know of a tokenizer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

_VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


class Tokenizer(Protocol):
    """What the project needs of a tokenizer. Implementations are immutable and may be shared by threads."""

    @property
    def vocab_size(self) -> int:
        """Valid token ids are 0 .. vocab_size - 1."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens after which the model has nothing more to say."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added in front or behind."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of `text` as a whole prompt: with the tokens in front that the model expects, such as Gemma's <bos> (vLLM: add_special_tokens)."""

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` from the first token on, special tokens included. Raises InvalidInput.

        `decode(encode(text)) == text`, except that Gemma takes “▁” for a space."""

    def token_text(self, token_id: int) -> str:
        """A short text for a block's slot: the word without its leading space, white space and lone bytes made visible. Raises InvalidInput."""


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character (GPT-2's table); this maps back."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
_LONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how a tokenizer without byte-level characters spells one


def visible(text: str) -> str:
    """`text` without one leading space before something visible; white space as signs, what cannot be printed by its number, as ``<0B>``."""
    if len(text) > 1 and text[0] == " " and not text[1].isspace():
        text = text[1:]
    return "".join(_VISIBLE.get(c) or (c if c.isprintable() else f"<{ord(c):02X}>") for c in text)


class FileTokenizer:
    """A `tokenizer.json` (the `tokenizers` library's format) and the folder's notes on which tokens end a text.

    `text_is_literal`: special tokens spelled out in a text are read as plain letters (so says `split_special_tokens` in tokenizer_config.json).
    """

    def __init__(self, backend: HuggingFaceTokenizer, stop_token_ids: tuple[int, ...], text_is_literal: bool) -> None:
        backend.encode_special_tokens = text_is_literal
        self._backend = backend
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._stop_token_ids = stop_token_ids
        self._special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_level = '"ByteLevel"' in str(getattr(backend.decoder, "__getstate__", lambda: b"")())

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: list[int]) -> str:
        for token_id in ids:
            self._check(token_id)
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        self._check(token_id)
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return f"<{token_id}>"
        if token_id in self._special:
            return piece
        if not self._byte_level:
            if byte := _LONE_BYTE.fullmatch(piece):
                return f"<{byte[1]}>"
            return visible(piece.replace("▁", " "))
        data = bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
        try:
            return visible(data.decode("utf-8"))
        except UnicodeDecodeError:
            return "".join(f"<{byte:02X}>" for byte in data)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise InvalidInput(f"Token {token_id} is outside the vocabulary: this model's tokens are 0 to {self._vocab_size - 1}.")


def read_json(path: Path) -> dict[str, Any]:
    """A folder's JSON file, {} when there is none. Raises InvalidInput when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON ({error}): copy the model folder again.") from error
    return content if isinstance(content, dict) else {}


def _stop_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


@lru_cache(maxsize=8)
def tokenizer_of_folder(folder: Path) -> FileTokenizer:
    """The tokenizer of a model folder, cached per process. Raises InvalidInput when tokenizer.json is missing or broken."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InvalidInput(f"{folder} has no tokenizer.json: a model folder needs config.json, tokenizer.json and *.safetensors.")
    try:
        backend = HuggingFaceTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InvalidInput(f"{file} is not a tokenizer file ({error}): copy the model folder again.") from error
    literal = bool(read_json(folder / "tokenizer_config.json").get("split_special_tokens", False))
    return FileTokenizer(backend, _stop_token_ids(folder), literal)
