"""Compile every kernel ahead of time, for devices that need not be there: proof that the interpreted source is a GPU's source too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.backend import UnknownBackend
from kernels.interpreter import LOCK
from kernels.launches import LaunchShape
from kernels.registers import RegisterUse, register_use
from kernels.triton_attention import paged_attention_kernel
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel

TARGETS: dict[str, GPUTarget] = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}

Constants: TypeAlias = dict[str, int | bool | None]


@dataclass(frozen=True)
class KernelVariant:
    """A kernel with everything fixed that the compiler must know."""

    name: str
    kernel: Any
    types: dict[str, str]  # of the arguments that are no int32 scalar
    constants: Constants


@dataclass(frozen=True)
class Compiled:
    """What one compilation produced. `assembly` is PTX or AMD GCN text, `binary` a cubin or hsaco file; `seconds` is wall time."""

    kernel: str
    target: str
    assembly: str
    binary: bytes
    shared_bytes: int
    seconds: float

    @property
    def register_use(self) -> RegisterUse:
        """Registers of a thread and what spilled; a fraction of a second for a CUDA target."""
        return register_use(self.assembly, TARGETS[self.target])


_UNWATCHED: Constants = {"witness_ptr": None, "WITNESS": False}
_NO_PROGRESS: Constants = {"progress_ptr": None, "progress_stride": None, "PROGRESS": False}


def _attention(
    name: str, dtype: str, head_dim: int, group: int, window: int, block_m: int, tile: int, decode: bool = False, witness: bool = False, progress: bool = False
) -> KernelVariant:
    types = {f"{argument}_ptr": f"*{dtype}" for argument in ("out", "query", "key_cache", "value_cache")}
    types |= {f"{argument}_ptr": "*i32" for argument in ("block_table", "query_block_request", "query_block_len", "query_block_position")}
    types["query_block_token_ptr"] = "*i64"
    constants: Constants = {
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 4,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": head_dim,
        "SLIDING_WINDOW": window,
        "UPCAST": False,
        "SINGLE_QUERY": decode,
        "LANES": 1,
        "BLOCK_M": block_m,
        "TILE": tile,
        "ONE_TILE": False,
        **({"WITNESS": True} if witness else _UNWATCHED | {"witness_stride": None}),
        **({"PROGRESS": True} if progress else _NO_PROGRESS),
    }
    return KernelVariant(name, paged_attention_kernel, types | {"scale_log2": "fp32", "witness_ptr": "*i64", "progress_ptr": "*fp32"}, constants)


def variants() -> list[KernelVariant]:
    """Every kernel, attention in the shapes that the launcher picks on a device (decode only and mixed, D 64 and 256, with a window)."""
    slots = {"query_start_loc_ptr": "*i32", "positions_ptr": "*i64", "block_table_ptr": "*i32", "slot_mapping_ptr": "*i64"}
    parallel: Constants = {"CP_WORLD_SIZE": 1, "CP_RANK": 0, "CP_INTERLEAVE": 1, "PAD_SLOT_ID": -1, "LANES": 1, "TILE": 1024}
    caches = {f"{argument}_ptr": "*bf16" for argument in ("key", "value", "key_cache", "value_cache")} | {"slot_mapping_ptr": "*i64", "witness_ptr": "*i64"}
    pages = {"source_ptr": "*bf16", "destination_ptr": "*bf16", "source_index_ptr": "*i64", "destination_index_ptr": "*i64", "witness_ptr": "*i64"}
    copies: Constants = {"PAGES": 1, "TILE": 1024}
    writes: Constants = {"BLOCK_SIZE": 16, "NUM_KV_HEADS": 4, "HEAD_DIM": 64, "ROW": 256, "TOKENS": 1, "EVEN": True}
    dense = writes | {"DENSE_SLOTS": True, "DENSE_HEADS": True}
    watched: Constants = {"WITNESS": True}
    whole: Constants = {"GATHER": True, "SCATTER": True}
    return [
        KernelVariant("slot mapping", slot_mapping_kernel, slots, parallel | {"BLOCK_SIZE": 16, "KERNEL_BLOCK_SIZE": 16}),
        KernelVariant("KV write", reshape_and_cache_kernel, caches, dense | _UNWATCHED),
        KernelVariant("KV write strided", reshape_and_cache_kernel, caches, writes | {"DENSE_SLOTS": False, "DENSE_HEADS": False} | _UNWATCHED),
        KernelVariant("KV write with witness", reshape_and_cache_kernel, caches, dense | watched),
        KernelVariant("page copy", copy_pages_kernel, pages, copies | whole | _UNWATCHED),
        KernelVariant("page gather", copy_pages_kernel, pages, copies | {"GATHER": True, "SCATTER": False} | _UNWATCHED),
        KernelVariant("page scatter", copy_pages_kernel, pages, copies | {"GATHER": False, "SCATTER": True} | _UNWATCHED),
        KernelVariant("page copy with witness", copy_pages_kernel, pages, copies | whole | watched),
        _attention("attention decode bf16 D64", "bf16", 64, 3, 0, 16, 64, decode=True),
        _attention("attention mixed fp16 D64 window", "fp16", 64, 3, 512, 64, 64),
        _attention("attention mixed bf16 D256", "bf16", 256, 4, 0, 32, 32),
        _attention("attention decode fp32 D64", "fp32", 64, 3, 0, 16, 64, decode=True),
        _attention("attention decode bf16 D64 witness", "bf16", 64, 3, 0, 16, 64, decode=True, witness=True),
        _attention("attention mixed fp16 D64 window witness", "fp16", 64, 3, 512, 64, 64, witness=True),
    ]


def variant_of(launch: LaunchShape, dtype: str) -> KernelVariant:
    """The kernel of a launch that `recorded_launches` saw, as it would be compiled for a GPU and without anybody watching. `dtype`: of query, keys and values:
    fp32, fp16 or bf16. Give it launches with a GPU's tiles (`interpreted_like_gpu`): others were never meant to be compiled."""
    known = next(variant for variant in variants() if variant.kernel.fn.__name__ == launch.kernel)
    off: Constants = {"UPCAST": False} | _UNWATCHED | {"witness_stride": None} | _NO_PROGRESS
    constants = launch.constants | {name: value for name, value in off.items() if name in known.kernel.arg_names}
    types = {name: f"*{dtype}" if kind in ("*bf16", "*fp16", "*fp32") else kind for name, kind in known.types.items()}
    return KernelVariant(launch.kernel, known.kernel, types, constants)


def compile_variant(variant: KernelVariant, target: str) -> Compiled:
    """Compile one kernel for a key of TARGETS. Raises UnknownBackend when TRITON_INTERPRET keeps Triton from compiling at all."""
    kernel = variant.kernel
    if not isinstance(kernel, JITFunction):
        raise UnknownBackend("Nothing can be compiled while TRITON_INTERPRET is set; unset it and start again.")
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in kernel.arg_names}
    # A launch finds out that pointers and strides are multiples of 16, and so do we: the compiler may then load 16 bytes at once.
    aligned = [i for i, name in enumerate(kernel.arg_names) if name not in variant.constants and (name.endswith("_ptr") or "_stride" in name)]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    started = time.perf_counter()
    with LOCK:
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
        result = triton.compile(source, target=TARGETS[target])
    seconds = time.perf_counter() - started
    is_cuda = TARGETS[target].backend == "cuda"
    return Compiled(
        kernel=variant.name,
        target=target,
        assembly=result.asm["ptx" if is_cuda else "amdgcn"],
        binary=result.asm["cubin" if is_cuda else "hsaco"],
        shared_bytes=result.metadata.shared,
        seconds=seconds,
    )


def compile_all() -> Iterator[Compiled]:
    """Every kernel for every target, in order; about ten seconds, less when Triton's cache on disk knows them."""
    for variant in variants():
        for target in TARGETS:
            yield compile_variant(variant, target)


def table() -> Iterator[str]:
    """The lines that `python -m kernels aot` prints. Bytes, but registers and spilled bytes are those of one thread."""
    yield f"{'kernel':40} {'target':12} {'assembly':>9} {'binary':>9} {'shared':>8} {'registers':>10} {'spilled':>8} {'seconds':>8}"
    for done in compile_all():
        use = done.register_use
        sizes = f"{len(done.assembly):9} {len(done.binary):9} {done.shared_bytes:8} {use.registers:10} {use.spilled_bytes:8} {done.seconds:8.2f}"
        yield f"{done.kernel:40} {done.target:12} {sizes}"
