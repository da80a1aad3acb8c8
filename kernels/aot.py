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
from kernels.configurations import attention_tiles, copy_tile, next_power_of_2, write_warps
from kernels.interpreter import LOCK
from kernels.launches import CompilerOptions, LaunchShape
from kernels.registers import RegisterUse, register_use
from kernels.triton_attention import paged_attention_kernel, reduce_splits_kernel
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel

TARGETS: dict[str, GPUTarget] = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}

Constants: TypeAlias = dict[str, int | bool | None]


@dataclass(frozen=True)
class KernelVariant:
    """A kernel with everything fixed that the compiler must know. `options`: None: Triton's own choice of warps and stages."""

    name: str
    kernel: Any
    types: dict[str, str]  # of the arguments that are no int32 scalar
    constants: Constants
    options: CompilerOptions | None = None


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


_POINTERS = {
    "paged_attention_kernel": dict.fromkeys(("block_table_ptr", "query_block_request_ptr", "query_block_len_ptr", "query_block_position_ptr"), "*i32")
    | {"query_block_token_ptr": "*i64", "scale_log2": "fp32", "witness_ptr": "*i64"}
    | dict.fromkeys(("partial_ptr", "partial_sums_ptr", "progress_ptr"), "*fp32"),
    "reduce_splits_kernel": {"partial_ptr": "*fp32", "partial_sums_ptr": "*fp32", "query_block_token_ptr": "*i64", "query_block_len_ptr": "*i32"},
    "slot_mapping_kernel": {"query_start_loc_ptr": "*i32", "positions_ptr": "*i64", "block_table_ptr": "*i32", "slot_mapping_ptr": "*i64"}
    | {"witness_ptr": "*i64"},
    "reshape_and_cache_kernel": {"slot_mapping_ptr": "*i64", "witness_ptr": "*i64"},
    "copy_pages_kernel": {"source_index_ptr": "*i64", "destination_index_ptr": "*i64", "witness_ptr": "*i64"},
}
_KERNELS = {
    kernel.fn.__name__: kernel for kernel in (paged_attention_kernel, reduce_splits_kernel, slot_mapping_kernel, reshape_and_cache_kernel, copy_pages_kernel)
}
_OPTIONAL = {
    "WITNESS": ("witness_ptr", "witness_stride"),
    "PROGRESS": ("progress_ptr", "progress_stride"),
    "SPLIT": ("partial_ptr", "partial_sums_ptr", "partial_stride"),
    "VALUES": ("value_source_ptr", "value_destination_ptr"),
}
"""What a launch gives its kernel only where a constant is true."""
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def make_variant(name: str, kernel: str, dtype: str, constants: Constants, options: CompilerOptions | None = None) -> KernelVariant:
    """`kernel` by its function's name; `dtype` (fp32, fp16, bf16) of queries, keys and values. Arguments that belong to what `constants` do not switch on are
    None, as in a launch without them."""
    function = _KERNELS[kernel]
    types = {argument: f"*{dtype}" for argument in function.arg_names if argument.endswith("_ptr")} | _POINTERS[kernel]
    switched: Constants = {}
    for switch, optional in _OPTIONAL.items():
        if switch in function.arg_names and not constants.get(switch):
            switched |= {switch: False} | {argument: None for argument in function.arg_names if argument in optional}
    return KernelVariant(name, function, types, switched | constants, options)


def attention_variant(
    dtype: str,
    head_dim: int,
    group: int,
    *,
    decode: bool,
    window: int = 0,
    split: bool = False,
    witness: bool = False,
    progress: bool = False,
    hip: bool = False,
) -> KernelVariant:
    """Paged attention in the configuration that the launcher picks on a GPU (of AMD when `hip`): 8 KV heads, blocks of 16 tokens."""
    tiles = attention_tiles(_BYTES[dtype], head_dim, group, decode, hip)
    told = [f"window {window}"] * bool(window) + ["split"] * split + ["witness"] * witness + ["progress"] * progress
    constants: Constants = {
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": max(16, next_power_of_2(head_dim)),
        "SLIDING_WINDOW": window,
        "UPCAST": False,
        "SINGLE_QUERY": decode,
        "LANES": 1,
        "BLOCK_M": tiles.rows,
        "TILE": tiles.keys,
        "ONE_TILE": False,
        "SPLIT": split,
        "WITNESS": witness,
        "PROGRESS": progress,
    }
    name = " ".join(["attention", "decode" if decode else "mixed", dtype, f"D{head_dim}", *told])
    return make_variant(name, "paged_attention_kernel", dtype, constants, CompilerOptions(tiles.num_warps, tiles.num_stages))


GROUPS = {32: 1, 64: 3, 80: 1, 128: 4, 256: 4}
"""Query heads per KV head, by head size, in what is compiled as default: SmolLM2's 9/3 of 64, Llama's 32/8 of 128, Gemma's 4/1 of 256, and one to one."""


def every_attention(target: str) -> list[KernelVariant]:
    """Attention in every default configuration: dtypes, head sizes, decode (split or not) and mixed, with and without window, plain and telling."""
    return [
        attention_variant(dtype, head_dim, group, decode=decode, window=window, split=split, witness=told, progress=told, hip=is_hip(target))
        for dtype in _BYTES
        for head_dim, group in GROUPS.items()
        for decode, split in ((True, False), (True, True), (False, False))
        for window in (0, 512)
        for told in (False, True)
    ]


def is_hip(target: str) -> bool:
    return bool(TARGETS[target].backend == "hip")


def variants(target: str = "cuda 90") -> list[KernelVariant]:
    """Every kernel, attention in some of the shapes that the launcher picks on a device; all of them: `every_attention`."""
    hip = is_hip(target)
    parallel: Constants = {"CP_WORLD_SIZE": 1, "CP_RANK": 0, "CP_INTERLEAVE": 1, "PAD_SLOT_ID": -1, "LANES": 1, "TILE": 1024}
    copies: Constants = {"PAGES": 1, "TILE": copy_tile(2), "VALUES": True}
    writes: Constants = {"BLOCK_SIZE": 16, "NUM_KV_HEADS": 4, "HEAD_DIM": 64, "ROW": 256, "TOKENS": 1, "EVEN": True}
    dense = writes | {"DENSE_SLOTS": True, "DENSE_HEADS": True}
    watched: Constants = {"WITNESS": True}
    whole: Constants = {"GATHER": True, "SCATTER": True}
    one_warp = CompilerOptions(write_warps(2 * 256))
    return [
        make_variant("slot mapping", "slot_mapping_kernel", "bf16", parallel | {"BLOCK_SIZE": 16, "KERNEL_BLOCK_SIZE": 16}),
        make_variant("slot mapping with witness", "slot_mapping_kernel", "bf16", parallel | watched | {"BLOCK_SIZE": 16, "KERNEL_BLOCK_SIZE": 16}),
        make_variant("KV write", "reshape_and_cache_kernel", "bf16", dense, one_warp),
        make_variant("KV write strided", "reshape_and_cache_kernel", "bf16", writes | {"DENSE_SLOTS": False, "DENSE_HEADS": False}, one_warp),
        make_variant("KV write with witness", "reshape_and_cache_kernel", "bf16", dense | watched, one_warp),
        make_variant("page copy", "copy_pages_kernel", "bf16", copies | whole),
        make_variant("page gather", "copy_pages_kernel", "bf16", copies | {"GATHER": True, "SCATTER": False}),
        make_variant("page scatter", "copy_pages_kernel", "bf16", copies | {"GATHER": False, "SCATTER": True}),
        make_variant("page copy with witness", "copy_pages_kernel", "bf16", copies | whole | watched),
        make_variant("page copy of keys alone", "copy_pages_kernel", "bf16", copies | whole | {"VALUES": False}),
        make_variant("reduction of splits", "reduce_splits_kernel", "bf16", {"NUM_Q_HEADS": 32, "HEAD_DIM": 128, "HEAD_PADDED": 128, "SPLITS": 64}),
        attention_variant("bf16", 64, 3, decode=True, hip=hip),
        attention_variant("bf16", 128, 4, decode=True, split=True, hip=hip),
        attention_variant("fp32", 64, 3, decode=True, hip=hip),
        attention_variant("fp16", 64, 3, decode=False, window=512, hip=hip),
        attention_variant("bf16", 128, 4, decode=False, hip=hip),
        attention_variant("bf16", 256, 4, decode=False, hip=hip),
        attention_variant("bf16", 64, 3, decode=True, witness=True, progress=True, hip=hip),
        attention_variant("fp16", 64, 3, decode=False, window=512, witness=True, progress=True, hip=hip),
    ]


def variant_of(launch: LaunchShape, dtype: str) -> KernelVariant:
    """The kernel of a launch that `recorded_launches` saw, as it would be compiled for a GPU and without anybody watching. `dtype`: of query, keys and values:
    fp32, fp16 or bf16. Give it launches with a GPU's tiles (`interpreted_like_gpu`): others were never meant to be compiled."""
    off: Constants = {name: False for name in ("UPCAST", "WITNESS", "PROGRESS") if name in _KERNELS[launch.kernel].arg_names}
    options = None if launch.num_warps is None or launch.num_stages is None else CompilerOptions(launch.num_warps, launch.num_stages)
    return make_variant(launch.kernel, launch.kernel, dtype, launch.constants | off, options)


def compile_variant(variant: KernelVariant, target: str) -> Compiled:
    """Compile one kernel for a key of TARGETS. Raises UnknownBackend when TRITON_INTERPRET keeps Triton from compiling at all."""
    kernel = variant.kernel
    if not isinstance(kernel, JITFunction):
        raise UnknownBackend("Nothing can be compiled while TRITON_INTERPRET is set; unset it and start again.")
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in kernel.arg_names}
    # A launch finds out that pointers and strides are multiples of 16, and so do we: the compiler may then load 16 bytes at once.
    aligned = [
        p.num
        for p in kernel.params
        if p.name not in variant.constants and not p.do_not_specialize and (p.name.endswith("_ptr") or "_stride" in p.name or p.name == "page_size")
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    options = {} if variant.options is None else variant.options._asdict()
    started = time.perf_counter()
    with LOCK:
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
        result = triton.compile(source, target=TARGETS[target], options=options)
    seconds = time.perf_counter() - started
    is_cuda = not is_hip(target)
    return Compiled(
        kernel=variant.name,
        target=target,
        assembly=result.asm["ptx" if is_cuda else "amdgcn"],
        binary=result.asm["cubin" if is_cuda else "hsaco"],
        shared_bytes=result.metadata.shared,
        seconds=seconds,
    )


def compile_all(every: bool = False) -> Iterator[Compiled]:
    """Every kernel for every target, in order; about a minute, less when Triton's cache on disk knows them. With `every`, attention in all default
    configurations besides, 540 of them: many minutes of one core."""
    for target in TARGETS:
        for variant in [*variants(target), *(every_attention(target) if every else [])]:
            yield compile_variant(variant, target)


def table(every: bool = False) -> Iterator[str]:
    """The lines that `python -m kernels aot` prints. Bytes, but registers and spilled bytes are those of one thread. The last line says what spills."""
    yield f"{'kernel':56} {'target':12} {'assembly':>9} {'binary':>9} {'shared':>8} {'registers':>10} {'spilled':>8} {'seconds':>8}"
    count, spilling = 0, []
    for done in compile_all(every):
        use = done.register_use
        count += 1
        spilling += [f"{done.kernel} on {done.target}"] * (use.spilled_bytes > 0)
        sizes = f"{len(done.assembly):9} {len(done.binary):9} {done.shared_bytes:8} {use.registers:10} {use.spilled_bytes:8} {done.seconds:8.2f}"
        yield f"{done.kernel:56} {done.target:12} {sizes}"
    yield f"{count} compiled; {'nothing spills' if not spilling else 'what spills: ' + '; '.join(spilling)}."
