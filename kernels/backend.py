"""Which implementation runs the four operations, decided in one place.

`triton`     the Triton kernels, compiled for a CUDA device;
`interpret`  the same Triton kernels, executed on the CPU by Triton's interpreter;
`torch`      the plain torch reference that defines what is correct.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from typing import Literal, get_args

BackendName = Literal["triton", "interpret", "torch"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
BACKEND_VARIABLE = "PAGEWALK_BACKEND"
FIRST_TRITON_WITHOUT_SWITCH = (3, 9)


class UnknownBackend(ValueError):
    """A backend that does not exist, or that cannot run here. `str(error)` is one sentence, safe to show to a person."""


@dataclass(frozen=True)
class Backend:
    """An implementation that can run here (`name`) and, in one sentence, why it was chosen (`reason`)."""

    name: BackendName
    reason: str


def choose_backend(requested: str | None = None, device: str = "cpu") -> Backend:
    """Choose the implementation for tensors on `device` ("cpu", "cuda", "cuda:1").

    In this order: `requested`, the environment variable PAGEWALK_BACKEND, Triton on a CUDA device, the torch reference.
    Raises UnknownBackend when the wish is no backend at all, or one that cannot run here.
    """
    if requested is not None:
        return _check(requested, device, "it was asked for")
    from_environment = os.environ.get(BACKEND_VARIABLE, "").strip()
    if from_environment:
        return _check(from_environment, device, f"{BACKEND_VARIABLE} says so")
    if _impossible("triton", device) is None:
        return Backend("triton", f"triton: the compiled kernels run, because the tensors are on {device}.")
    return Backend("torch", f"torch: the reference runs, because the tensors are on {device} and nothing else was asked for.")


def _check(requested: str, device: str, why: str) -> Backend:
    for name in BACKENDS:
        if name == requested:
            obstacle = _impossible(name, device)
            if obstacle is not None:
                raise UnknownBackend(f"Backend {name!r} cannot run here: {obstacle}; choose one of {_choices(device)}.")
            return Backend(name, f"{name}: chosen because {why}.")
    raise UnknownBackend(f"There is no backend {requested!r}; choose one of {', '.join(BACKENDS)}.")


def _choices(device: str) -> str:
    return ", ".join(name for name in BACKENDS if _impossible(name, device) is None)


def _impossible(name: BackendName, device: str) -> str | None:
    """What keeps `name` from running on `device`; None when nothing does."""
    if name == "torch":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    interpreted_everywhere = _interpreter_is_forced()
    if name == "triton":
        if not device.startswith("cuda"):
            return f"it needs a CUDA device and the tensors are on {device}"
        if interpreted_everywhere:
            return "TRITON_INTERPRET is set, so nothing is compiled"
        import torch

        return None if torch.cuda.is_available() else "torch finds no CUDA device"
    version = _triton_version()
    if not interpreted_everywhere and version >= FIRST_TRITON_WITHOUT_SWITCH:
        return f"Triton {version[0]}.{version[1]} interprets only when TRITON_INTERPRET=1 is set before the program starts (older ones switch at any time)"
    return None


def _interpreter_is_forced() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


def _triton_version() -> tuple[int, int]:
    for distribution in ("triton", "triton-windows"):
        try:
            major, minor = importlib.metadata.version(distribution).split(".")[:2]
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return (0, 0)
