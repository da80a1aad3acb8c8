"""Four operations on a paged KV cache: slot mapping, KV write, attention and block copy.

Each exists twice: as a Triton kernel (compiled on a CUDA device, interpreted on a CPU) and as a plain torch reference that defines what is
correct. Importing this package loads neither torch nor Triton.
"""

from __future__ import annotations

from kernels.backend import BACKEND_VARIABLE, BACKENDS, Backend, GpuTiles, UnknownBackend, choose_backend, interpreted_like_gpu
from kernels.dispatch import PAD_SLOT_ID, compute_slot_mapping, copy_blocks, paged_attention, reshape_and_cache
from kernels.launches import LaunchShape, recorded_launches
from kernels.metadata import AttentionMetadata
from kernels.progress import LaneProgress, LaunchProgress, Progress, RowProgress
from kernels.witness import LaunchWitness, MappingAccess, MappingWitness, ProgramAccess, Witness

__all__ = [
    "BACKENDS",
    "BACKEND_VARIABLE",
    "PAD_SLOT_ID",
    "AttentionMetadata",
    "Backend",
    "GpuTiles",
    "LaneProgress",
    "LaunchProgress",
    "LaunchShape",
    "LaunchWitness",
    "MappingAccess",
    "MappingWitness",
    "ProgramAccess",
    "Progress",
    "RowProgress",
    "UnknownBackend",
    "Witness",
    "choose_backend",
    "compute_slot_mapping",
    "copy_blocks",
    "interpreted_like_gpu",
    "paged_attention",
    "recorded_launches",
    "reshape_and_cache",
]
