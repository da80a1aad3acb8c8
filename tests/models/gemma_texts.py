"""Texts on which Gemma's tokenizer is compared, and how what transformers makes of the GGUF file was written down.

    python -m tests.models.gemma_texts FOLDER_WITH_THE_GGUF GGUF_NAME

loads the file with transformers' own GGUF loader (which asks for the package accelerate and takes minutes) and rewrites gemma_reference.json.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from engine.models.tiny_tokenizer import read_passages

REFERENCE = Path(__file__).with_name("gemma_reference.json")
NUM_RANDOM_TEXTS = 1500
NOT_OF_THE_FILE = ("quantization_config", "transformers_version", "_model_name_or_path", "unk_token_id", "id2label", "label2id")
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz ",
    "The quick-brown_fox, (42) == 3.14; don't!? \n\t",
    "äöüßéèñçøåŁžΑβγДжשלוםمرحبا你好世界こんにちは한국어ไทยहिन्दी ",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈é̀\u200b\u00a0\u3000\u0000\u001b ",
    "    \n\n\n\t\t\r ",
)
PLAIN_TEXTS = (
    "",
    "Four score and seven years ago",
    " leading",
    "trailing ",
    "two  spaces and   three",
    "\n",
    "a\n\nb\n\n\nc",
    "\tdef f(x):\n\t\treturn x ** 2\n",
    "2048 blocks of 16",
    "<bos> and <eos> and <start_of_turn>user",
    "<table><tr><td>x</td></tr></table>",
    "<unused17> is not a word",
    "Grüße, 你好 🎉",
    "▁ is a sign of its own",
    "http://example.org/a_b?c=d#e",
    "ﬁ ligature, ½, №, e\u0301",
)


def texts() -> list[str]:
    """The plain ones, the passages of `tiny`, and random ones of several scripts."""
    generator = random.Random(0)
    made = ["".join(generator.choices(generator.choice(ALPHABETS), k=generator.randint(1, 60))) for _ in range(NUM_RANDOM_TEXTS)]
    return [*PLAIN_TEXTS, *read_passages().values(), *made]


def digest_of_ids(rows: Iterable[list[int]]) -> str:
    """SHA-256 of lists of token ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{','.join(map(str, row))};".encode())
    return digest.hexdigest()


def record(folder: str, name: str) -> None:
    """Write gemma_reference.json from what transformers makes of the file."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    rows = [tokenizer(text)["input_ids"] for text in texts()]
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}  # tied
    config = {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_FILE}
    reference = {
        "made_by": f"transformers {transformers.__version__}, its own GGUF loader",
        "config": config,
        "tensors": {key: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for key, tensor in sorted(tensors.items())},
        "prompts": dict(zip(PLAIN_TEXTS, rows, strict=False)),
        "digest_of_all_prompts": digest_of_ids(rows),
    }
    text = json.dumps(reference, indent=1, ensure_ascii=True)
    text = re.sub(r"\[\s+((?:\d+,\s+)*\d+)\s+\]", lambda row: "[" + re.sub(r"\s+", " ", row[1]) + "]", text)  # a row of ids on one line
    REFERENCE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(*sys.argv[1:3])
