"""Backend `interpret`: the Triton kernels on the CPU."""

from __future__ import annotations

from kernels.interpreter import launch
from kernels.launch import Launcher

_launcher = Launcher(run=launch, interpreted=True, own_account=False)

compute_slot_mapping = _launcher.compute_slot_mapping
reshape_and_cache = _launcher.reshape_and_cache
paged_attention = _launcher.paged_attention
copy_blocks = _launcher.copy_blocks
