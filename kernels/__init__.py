"""Four operations on a paged KV cache: slot mapping, KV write, attention and block copy.

Each exists twice: as a Triton kernel (compiled on a CUDA device, interpreted on a CPU) and as a plain torch reference that defines what is
correct. Importing this package loads neither torch nor Triton.
"""

from __future__ import annotations

from kernels.backend import BACKENDS, Backend, UnknownBackend, choose_backend
from kernels.dispatch import PAD_SLOT_ID, compute_slot_mapping, copy_blocks, paged_attention, reshape_and_cache
from kernels.metadata import AttentionMetadata
from kernels.witness import LaunchWitness, ProgramAccess, Witness

__all__ = [
    "BACKENDS",
    "PAD_SLOT_ID",
    "AttentionMetadata",
    "Backend",
    "LaunchWitness",
    "ProgramAccess",
    "UnknownBackend",
    "Witness",
    "choose_backend",
    "compute_slot_mapping",
    "copy_blocks",
    "paged_attention",
    "reshape_and_cache",
]
