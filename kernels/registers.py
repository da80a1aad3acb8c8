"""How many registers a kernel takes that was compiled ahead of time, and what did not fit into them: what decides how many programs run side by side on a GPU.

For CUDA the assembler that comes with Triton says it, called as Triton calls it; AMD's compiler writes it into its assembly text.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability


class RegisterUse(NamedTuple):
    """`registers`: of one thread, 32 bits each. `spilled_bytes`: of one thread's values that are kept in memory because no register was free."""

    registers: int
    spilled_bytes: int


def register_use(assembly: str, target: GPUTarget) -> RegisterUse:
    """Of a kernel's PTX or AMD GCN text, as `kernels.aot` produces it; PTX is assembled once more, in a fraction of a second. Raises RuntimeError, with the
    assembler's words, when it says something else than numbers."""
    if target.backend != "cuda":
        numbers = {name: int(number) for name, number in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly)}
        # Scalars that find no register of theirs go into a vector register; only what lies in the thread's private memory has none.
        return RegisterUse(numbers["vgpr_count"], numbers["private_segment_fixed_size"])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(assembly)
        options = ["-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(target.arch)}"]
        done = subprocess.run([get_ptxas(target.arch).path, *options, str(source), "-o", str(Path(folder, "kernel.cubin"))], capture_output=True, text=True)
    told = done.stdout + done.stderr
    registers, stores = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    if registers is None or stores is None:
        raise RuntimeError(f"ptxas does not say how many registers the kernel takes: {told.strip()}")
    return RegisterUse(int(registers[1]), int(stores[1]))
