"""Builds the tokenizer of `tiny`: one token per word, and smaller pieces down to bytes for everything else.

A text is encoded as if one space stood before it and after every line break, so that a word is the same token at the start, after a space and at
the start of a line; decoding takes exactly those spaces away again, so any text comes back unchanged. A word found in the vocabulary is one token;
any other word is split by byte-level BPE, whose alphabet is the 256 bytes, so no text is out of reach.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

TINY_DIR = Path(__file__).parent / "tiny"
TINY_SWA_DIR = Path(__file__).parent / "tiny-swa"  # the same words, layers with a sliding window
TINY_HYBRID_DIR = Path(__file__).parent / "tiny-hybrid"  # the same words, layers with a recurrent state
EOS = "<eos>"
# A word keeps its apostrophes; "--" and "=>" are one sign each; any other sign and any digit stands alone.
WORD_PATTERN = r" ?\p{L}+(?:['’]\p{L}+)*| ?--| ?=>| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"
NUM_SUBWORDS = 640
MAX_VOCAB_SIZE = 4096


def read_passages() -> dict[str, str]:
    """Title (file name without number and ending) -> text, in the order of the file names, without the last line break."""
    files = sorted((TINY_DIR / "passages").glob("*.txt"))
    return {re.sub(r"^\d+-", "", file.stem): file.read_text(encoding="utf-8").rstrip("\n") for file in files}


def build_tokenizer() -> HuggingFaceTokenizer:
    """The tokenizer over the words of the passages and of common-words.txt. Deterministic; reads only those files."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(Regex(r"\n(?=[^\n])"), "\n ")])
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    passages = list(read_passages().values())
    common_words = (TINY_DIR / "common-words.txt").read_text(encoding="utf-8").split()

    subwords = Tokenizer(models.BPE())
    subwords.normalizer, subwords.pre_tokenizer = normalizer, pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_SUBWORDS, initial_alphabet=alphabet, max_token_length=5, show_progress=False, special_tokens=[]
    )
    subwords.train_from_iterator([*passages, " ".join(common_words)], trainer)

    trained = json.loads(subwords.to_str())["model"]
    pieces = {EOS: 0}
    for piece in sorted(trained["vocab"], key=trained["vocab"].__getitem__):
        pieces.setdefault(piece, len(pieces))
    words = [word for text in [*passages, *common_words] for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]
    for word in words:
        pieces.setdefault(word, len(pieces))
    space = next(word[0] for word in words if len(word) > 1)  # the byte-level sign for a space: the first word of a text has one
    for word in words:  # the same words behind a quotation mark or a bracket, where no space stands
        pieces.setdefault(word.removeprefix(space) if word.startswith(space) else space + word, len(pieces))
    if len(pieces) > MAX_VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {len(pieces)} tokens, but tiny is meant to have at most {MAX_VOCAB_SIZE}: take out some words")

    merges = [tuple(merge) for merge in trained["merges"]]
    # ignore_merges: a word that is in the vocabulary is one token even though no merge leads to it.
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges, ignore_merges=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(r"\n (?=[^\n])"), "\n"), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([EOS])
    return tokenizer
