"""Weights into memory: `load_model`, once per process and folder."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidInput
from engine.libraries import load_libraries
from engine.models.catalog import resolve
from engine.models.tokenizer import Tokenizer, read_json, tokenizer_of_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINGERPRINT_FILE = "pagewalk.json"
_lock = threading.Lock()
_loaded: dict[Path, LoadedModel] = {}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: float32, in eval mode, on the CPU, no parameter asks for gradients. Shared by everyone in the process.

    `fingerprint`: 16 hex digits over weights and tokenizer; the same files give the same digits everywhere. `max_model_len`: in tokens.
    `shape`: architecture, num_layers, num_q_heads, num_kv_heads, head_dim, hidden_size, vocab_size, max_position_embeddings, num_parameters.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    fingerprint: str
    shape: dict[str, Any]
    max_model_len: int


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer of a named model or a local folder, cached per process; needs no torch. Raises InvalidInput."""
    return tokenizer_of_folder(resolve(name_or_path)[1])


def max_model_len_of(name_or_path: str) -> int | None:
    """How many positions the model has, in tokens, from its config.json (None: it does not say); needs no torch. Raises InvalidInput."""
    positions = read_json(resolve(name_or_path)[1] / "config.json").get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def num_layers_of(name_or_path: str) -> int | None:
    """How many layers the model has, from its config.json (None: it does not say); needs no torch. Raises InvalidInput."""
    layers = read_json(resolve(name_or_path)[1] / "config.json").get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def load_model(name_or_path: str) -> LoadedModel:
    """The model of that name or in that folder; the second call returns the same object. Never goes online. Raises InvalidInput."""
    name, folder = resolve(name_or_path)
    with _lock:
        if folder not in _loaded:
            _loaded[folder] = _load(name, folder)
        return _loaded[folder]


def _is_no_kernel_remark(record: logging.LogRecord) -> bool:
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def quiet_reference_implementations() -> None:
    """Layers with a recurrent state run on the functions of transformers itself on purpose: that a faster package is not installed is no news to a reader of
    the output. Every other remark of that logger still appears."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_kernel_remark)


def _is_no_loading_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def quiet_loading_report() -> None:
    """No table of missing and superfluous weights from transformers on the error stream: what is missing is said in one sentence, and refused."""
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_loading_report)


def fingerprint_of(folder: Path) -> str:
    """16 hex digits of the SHA-256 over the names and contents of the weights and the tokenizer.

    A pulled model's digits were written down when it was unpacked (the file says for which sizes), because reading 500 MB again takes a second.
    """
    files = [*sorted(folder.glob("*.safetensors")), folder / "tokenizer.json"]
    sizes = {file.name: file.stat().st_size for file in files}
    noted = read_json(folder / FINGERPRINT_FILE)
    if noted.get("sizes") == sizes and isinstance(noted.get("fingerprint"), str):
        return str(noted["fingerprint"])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _reason(error: Exception) -> str:
    """What a library says first, on one line: the second line, too, where the first one only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "ignore_mismatched_sizes" in lines[0]:
        return "its weights have other shapes than its config.json says"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:")


def _load(name: str, folder: Path) -> LoadedModel:
    load_libraries()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    quiet_reference_implementations()
    quiet_loading_report()
    transformers_logging.disable_progress_bar()  # a second's work; a bar would run into what commands print
    tokenizer = tokenizer_of_folder(folder)
    try:
        model: Any
        model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except Exception as error:  # a broken file can fail in safetensors, in the config or in torch; the person needs what comes first
        raise InvalidInput(f"The model in {folder} cannot be loaded ({_reason(error)}): get its files again.") from error
    if missing := sorted(found["missing_keys"]):  # transformers would make numbers up for them
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidInput(f"The weights in {folder} lack {missing[0]}{more}, which its config.json asks for: the files do not belong together.")
    model.eval().requires_grad_(False)
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise InvalidInput(
            f"The model in {folder} knows {config.vocab_size} tokens but its tokenizer makes {tokenizer.vocab_size}: the files do not belong together."
        )
    num_q_heads = int(config.num_attention_heads)
    shape = {
        "architecture": config.architectures[0],
        "num_layers": int(config.num_hidden_layers),
        "num_q_heads": num_q_heads,
        "num_kv_heads": int(getattr(config, "num_key_value_heads", None) or num_q_heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // num_q_heads),
        "hidden_size": int(config.hidden_size),
        "vocab_size": int(config.vocab_size),
        "max_position_embeddings": int(config.max_position_embeddings),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    return LoadedModel(name, model, tokenizer, fingerprint_of(folder), shape, int(config.max_position_embeddings))
