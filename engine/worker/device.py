"""Where the tensors of a run live: on the CUDA device when there is one and compiled kernels are wanted, else on the CPU."""

from __future__ import annotations

import copy
import threading

import torch
from transformers import PreTrainedModel

from engine.errors import InvalidInput

_lock = threading.Lock()
_copies: dict[tuple[int, str], PreTrainedModel] = {}


def choose_device(requested_backend: str | None) -> str:
    """ "cuda" for the compiled kernels and for the default where torch finds a device; "cpu" for the interpreter and the reference."""
    return "cuda" if requested_backend in (None, "triton") and torch.cuda.is_available() else "cpu"


def model_on(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """`model` itself on the CPU, or its one copy per process on another device. The loaded model stays where it is, because other runs may use it there.
    Raises InvalidInput when the device has no memory for it."""
    if device == "cpu":
        return model
    with _lock:
        key = (id(model), device)
        if key not in _copies:
            try:
                _copies[key] = copy.deepcopy(model).to(device)
            except torch.OutOfMemoryError as error:
                raise InvalidInput(
                    f"{type(model).__name__} does not fit into the memory of the GPU; run it with the backend torch, or take a smaller model."
                ) from error
        return _copies[key]
