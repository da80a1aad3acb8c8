"""Rebuilds a tokenizer.json from what a GGUF file says of its tokenizer. Needs no torch.

Two kinds are known. SmolLM's: byte-level BPE; llama.cpp calls its pre-tokenizer “smollm” (single digits, then GPT-2's pattern). Gemma's: pieces of Unicode
text with “▁” for a space and single bytes as a last resort; its file lists no merges, but the order of the tokens implies them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4
"""tokenizer.ggml.token_type of a special token, and of a text that is always one token."""


def write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """tokenizer.json and tokenizer_config.json from a GGUF file's fields. Raises ValueError for a kind that is not known here."""
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    is_gemma = fields.get("general.architecture") == "gemma3" and kind[0] == "llama"
    if not is_gemma and kind != ("gpt2", "smollm"):
        raise ValueError(f"its tokenizer is of the kind {kind}, and only smollm's ('gpt2', 'smollm') and that of gemma3 are known here")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    tokenizer = _gemma_tokenizer(fields) if is_gemma else _smollm_tokenizer(fields)
    # Compact: with a quarter of a million tokens, line breaks and spaces would double the file.
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=not is_gemma), encoding="utf-8")
    notes: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields[f"{fields['general.architecture']}.context_length"]),
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    if is_gemma:
        notes["bos_token"] = tokens[fields["tokenizer.ggml.bos_token_id"]]
    (out / "tokenizer_config.json").write_text(json.dumps(notes, indent=2), encoding="utf-8")


def merges_of_order(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The merges that a vocabulary in the order of its training implies: earlier tokens first, and of one token's splits the one with the longest left part.

    transformers derives the same list for a Gemma file (`gemma_tokenizer` and `generate_merges`), by sorting.
    """
    known = {token: index for index, token in enumerate(tokens)}
    in_order = sorted(known, key=known.__getitem__)
    return [
        (token[:cut], token[cut:]) for token in in_order for cut in range(len(token) - 1, 0, -1) if token[:cut] in known and token[cut:] in known
    ]  # fmt: skip


def _smollm_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = [merge.partition(" ") for merge in fields["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, _, right in left_right]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _tokens_of_type(fields, CONTROL_TOKEN)])
    return tokenizer


def _gemma_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    written: list[str] = fields["tokenizer.ggml.tokens"]
    # The file spells runs of spaces as spaces, the tokenizer looks them up as “▁▁”.
    tokens = ["▁" * len(token) if " " in token and not token.strip() else token for token in written]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges_of_order(tokens), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    begin = fields["tokenizer.ggml.bos_token_id"]
    if fields.get("tokenizer.ggml.add_bos_token", True):  # only where a text is read as a whole prompt
        name = tokens[begin]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1", special_tokens=[(name, begin)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _tokens_of_type(fields, CONTROL_TOKEN)])
    whole = [token for token in _tokens_of_type(fields, USER_DEFINED_TOKEN) if token in vocabulary]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    return tokenizer


def _tokens_of_type(fields: dict[str, Any], token_type: int) -> list[str]:
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind == token_type]
