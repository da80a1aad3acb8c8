"""What the kernels of a close-up become on GPUs: compiled ahead of time for devices that need not be there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

from engine.trace.closeup import CompiledKernel, KernelCloseup
from kernels import GpuTiles, LaunchShape, UnknownBackend, recorded_launches

TARGETS = ("cuda 80", "cuda 90", "hip gfx942")
"""Of `kernels.aot`: Ampere, Hopper, and AMD's MI300."""

NumberType = Literal["fp32", "fp16", "bf16"]


def compiled_kernels(closeup: KernelCloseup, number_type: NumberType = "fp32") -> list[CompiledKernel]:
    """Every kernel of the step for each of `TARGETS`, in the shape that a GPU would get (its own tiles, whatever tile the close-up was made with).

    number_type: of query, keys and values; Pagewalk's runs have fp32. Takes a second or two per kernel and target the first time; Triton keeps what it compiled
    on disk. Raises nothing: a kernel that cannot be compiled says why, in one sentence.
    """
    shapes = [*_that_move(closeup), *_attention(closeup, number_type)] if importlib.util.find_spec("triton") else []
    if not shapes:
        names = dict.fromkeys(launch.kernel for launch in closeup.gpu)
        return [
            CompiledKernel(kernel=name, target=target, error="Triton is not installed, so nothing can be compiled.") for name in names for target in TARGETS
        ]
    return [_compiled(shape, target, number_type) for shape in shapes for target in TARGETS]


def _that_move(closeup: KernelCloseup) -> Iterator[LaunchShape]:
    """Slot mapping, KV write and page copies as they were launched, each shape once."""
    seen: list[tuple[str, dict[str, int | bool | None]]] = []
    for launch in closeup.gpu:
        if launch.attention or (launch.kernel, launch.constants) in seen or launch.kernel == "reduce_splits_kernel":
            continue
        seen.append((launch.kernel, launch.constants))
        yield LaunchShape(launch.kernel, launch.grid, launch.lanes, dict(launch.constants), launch.num_warps, launch.num_stages)


def _attention(closeup: KernelCloseup, number_type: NumberType) -> list[LaunchShape]:
    """The attention launches as a GPU's host code shapes them, taken down without running any."""
    import torch

    from kernels.launch import Launcher
    from kernels.metadata import Derived

    def nothing(*arguments: Any, **constants: Any) -> None:
        """Launch nothing."""

    last = closeup.table[-1].tokens[1]
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[number_type]
    query = torch.zeros(last, closeup.num_q_heads, closeup.head_dim, dtype=dtype)
    cache = torch.zeros(1, closeup.block_size, closeup.num_kv_heads, closeup.head_dim, dtype=dtype)
    seq_lens = [row.first_position + row.tokens[1] - row.tokens[0] for row in closeup.table]
    derived = Derived()
    derived.max_seq_len = max(seq_lens)
    with recorded_launches() as shapes:
        Launcher(run=nothing, interpreted=True, own_account=False, gpu_tiles=GpuTiles()).paged_attention(
            query,
            cache,
            cache,
            torch.zeros(len(closeup.table), max(len(row.block_ids) for row in closeup.table), dtype=torch.int32),
            torch.tensor([0, *(row.tokens[1] for row in closeup.table)], dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            scale=closeup.scale,
            sliding_window=closeup.sliding_window,
            out=torch.zeros_like(query),
            derived=derived,
        )
    return shapes


def _compiled(shape: LaunchShape, target: str, number_type: NumberType) -> CompiledKernel:
    from triton.errors import TritonError

    from kernels.aot import compile_variant, variant_of

    try:
        done = compile_variant(variant_of(shape, number_type), target)
        use = done.register_use
    except UnknownBackend as error:
        return CompiledKernel(kernel=shape.kernel, target=target, error=str(error))
    except (TritonError, RuntimeError, ValueError, OSError) as error:  # Triton's passes and assemblers have no type of their own
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return CompiledKernel(kernel=shape.kernel, target=target, error=f"The kernel cannot be compiled for {target} in this shape: {reason}")
    return CompiledKernel(
        kernel=shape.kernel,
        target=target,
        assembly_bytes=len(done.assembly),
        binary_bytes=len(done.binary),
        shared_bytes=done.shared_bytes,
        registers=use.registers,
        spilled_bytes=use.spilled_bytes,
    )
