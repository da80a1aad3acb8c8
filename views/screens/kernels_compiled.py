"""What the compiler makes of the kernels for GPUs that need not be there: sizes, shared memory, registers."""

from __future__ import annotations

import streamlit as st

from engine.trace.closeup import CompiledKernel
from views import state
from views.screens.kernels_view import NAMES, View
from views.screens.tables import table

TARGETS = {"cuda 80": "NVIDIA A100 (sm_80)", "cuda 90": "NVIDIA H100 (sm_90)", "hip gfx942": "AMD MI300 (gfx942)"}
COLUMNS = ("Kernel", "Compiled for", "Assembly", "Binary", "Shared memory", "Registers", "Spilled")
REGISTERS, MOST_WARPS, QUARTERS, WARP, PORTION = 65_536, 64, 4, 32, 256
"""Of a multiprocessor with compute capability 8.0 or 9.0, which has four quarters with registers of their own; threads of a warp; and the portions in which a
warp gets registers."""
WORDS = """- **Registers** are what a thread computes with. A multiprocessor of an A100 or H100 has 65,536 of them for all programs that it runs \
at a time: with 128 threads of 128 registers each, a program takes a quarter. The fewer it takes, the more run side by \
side and hide each other's waiting (occupancy).
- **Spilled** bytes did not fit into the registers; each thread keeps them in memory, which is slow. None is best.
- **Assembly** is PTX for NVIDIA and GCN text for AMD, **binary** what the GPU loads. **Shared memory** is the program's own fast memory, where tiles wait."""


def compiled_part(view: View) -> None:
    """The table, computed when somebody first asks for it."""
    with st.spinner("Compiling the kernels ahead of time, in the shapes of this layer …", show_time=True):
        found = state.compiled(view.closeup)
    rows = [[NAMES.get(kernel.kernel, kernel.kernel), TARGETS.get(kernel.target, kernel.target), *_sizes(kernel)] for kernel in found]
    if rows:
        st.markdown("**Compiled ahead of time**, in the shapes that this step would have on a GPU (its own tiles, float32). No GPU is needed for it.")
        table(COLUMNS, rows, words=(0, 1))
    for problem in dict.fromkeys(kernel.error for kernel in found if kernel.error):
        st.info(problem, icon=":material/info:")
    st.markdown(WORDS + _occupancy(found))


def _occupancy(found: list[CompiledKernel]) -> str:
    """What the attention kernel's registers leave room for on an H100; "" where it was not compiled. A warp's registers are given out in portions of 256."""
    registers = next((k.registers for k in found if k.kernel == "paged_attention_kernel" and k.target == "cuda 90" and k.registers), None)
    if registers is None:
        return ""
    per_warp = -(-registers * WARP // PORTION) * PORTION
    warps = min(MOST_WARPS, REGISTERS // QUARTERS // per_warp * QUARTERS)
    return (
        f"\n- Here: with {registers} registers per thread, a warp of the attention kernel takes {per_warp:,}, so **{warps} of {MOST_WARPS}** warps fit on a "
        "multiprocessor of an H100 at a time, as far as registers decide it (65,536 registers and 64 warps: NVIDIA's table of compute capability 9.0)."
    )


def _sizes(kernel: CompiledKernel) -> list[str]:
    """Of what was compiled; dashes for what was not."""
    if kernel.error is not None:
        return ["–"] * 5
    sizes = (kernel.assembly_bytes, kernel.binary_bytes, kernel.shared_bytes)
    return [*(f"{size:,} bytes" for size in sizes), str(kernel.registers), f"{kernel.spilled_bytes:,} bytes"]
