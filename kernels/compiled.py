"""Backend `triton`: the Triton kernels, compiled for the CUDA device that the tensors are on."""

from __future__ import annotations

from typing import Any

from kernels.interpreter import LOCK
from kernels.launch import Launcher


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    with LOCK:  # the first launch compiles, which must not see triton.language while another thread interprets
        kernel[grid](*arguments, **constants)


_launcher = Launcher(run=_launch, interpreted=False, own_account=True)

compute_slot_mapping = _launcher.compute_slot_mapping
reshape_and_cache = _launcher.reshape_and_cache
paged_attention = _launcher.paged_attention
copy_blocks = _launcher.copy_blocks
