"""Which implementation runs the four operations, decided in one place.

`triton`     the Triton kernels, compiled for a CUDA device;
`interpret`  the same Triton kernels, executed on the CPU by Triton's interpreter;
`torch`      the plain torch reference that defines what is correct.
"""

from __future__ import annotations

import functools
import importlib
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
class GpuTiles:
    """Cut the work as for a GPU: one lane per program, tiles from `kernels.configurations`. `tile`: another number of keys per iteration (a power of two),
    so that a short context has several; `splits`: another number of programs that share the keys of a query; None: as on the GPU. `multiprocessors`: of the
    GPU that is meant (an H100 has 132), which decides the number of splits."""

    tile: int | None = None
    splits: int | None = None
    multiprocessors: int = 132


@dataclass(frozen=True)
class Backend:
    """An implementation that can run here (`name`) and, in one sentence, why it was chosen (`reason`). `gpu_tiles`: of the backend `interpret` only; None:
    tiles that suit the interpreter."""

    name: BackendName
    reason: str
    gpu_tiles: GpuTiles | None = None


def interpreted_like_gpu(tile: int | None = None, splits: int | None = None) -> Backend:
    """The interpreter, with the programs and tiles that a GPU would get: slow (a program costs milliseconds), to look at. `tile`, `splits`: see `GpuTiles`.

    Raises UnknownBackend where the interpreter cannot run, and ValueError for a tile that is no power of two or a number of splits below 1.
    """
    if tile is not None and (tile < 1 or tile & (tile - 1)):
        raise ValueError(f"A tile of {tile} keys cannot be: it must be a power of two.")
    if splits is not None and splits < 1:
        raise ValueError(f"{splits} splits cannot be: at least one program must walk the keys.")
    _check("interpret", "cpu", "")
    return Backend("interpret", "interpret: the programs and tiles of a GPU, one after the other.", GpuTiles(tile, splits))


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
    who = f" ({BACKEND_VARIABLE} asks for it)" if why.startswith(BACKEND_VARIABLE) else ""
    for name in BACKENDS:
        if name == requested:
            obstacle = _impossible(name, device)
            if obstacle is not None:
                raise UnknownBackend(f"Backend {name!r} cannot run here{who}: {obstacle}; choose one of {_choices(device)}.")
            return Backend(name, f"{name}: chosen because {why}.")
    raise UnknownBackend(f"There is no backend {requested!r}{who}; choose one of {', '.join(BACKENDS)}.")


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

        return _triton_trouble() if torch.cuda.is_available() else "torch finds no CUDA device"
    version = _triton_version()
    if not interpreted_everywhere and version >= FIRST_TRITON_WITHOUT_SWITCH:
        return f"Triton {version[0]}.{version[1]} interprets only when TRITON_INTERPRET=1 is set before the program starts (older ones switch at any time)"
    return _triton_trouble()


@functools.cache
def _triton_trouble() -> str | None:
    """What an installed Triton says when it cannot be loaded, such as a library of the system that it misses; None when it can."""
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation can fail with anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Triton is installed but cannot be loaded ({reason})"
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
