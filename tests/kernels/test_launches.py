"""Compiled launches as far as they go without a GPU: Triton's own launching code binds the arguments, specialises and compiles; only the device is missing."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
from kernels.backend import GpuTiles
from kernels.launch import Launcher
from kernels.metadata import Derived
from kernels.triton_attention import paged_attention_kernel, reduce_splits_kernel
from kernels.triton_cache import copy_pages_kernel, reshape_and_cache_kernel, slot_mapping_kernel

KERNELS = [paged_attention_kernel, reduce_splits_kernel, slot_mapping_kernel, reshape_and_cache_kernel, copy_pages_kernel]


class Hopper:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def no_device(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in KERNELS:
        kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", Hopper())
    yield
    for kernel in KERNELS:
        kernel.device_caches.clear()


def compile_only(kernel: JITFunction, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    assert kernel.warmup(*arguments, grid=grid, **constants) is not None


COMPILED = Launcher(run=compile_only, interpreted=False, own_account=True)
IN_SPLITS = Launcher(run=compile_only, interpreted=False, own_account=True, gpu_tiles=GpuTiles(splits=4))


def count(kernel: JITFunction) -> int:
    """How many times the kernel was compiled."""
    return sum(len(cache[0]) for cache in kernel.device_caches.values())


def attend(batch_of, launcher: Launcher, query_lens: list[int], seq_lens: list[int], width: int, **told: object) -> None:
    batch = batch_of(query_lens, seq_lens, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, width - batch.block_table.shape[1]))
    launcher.paged_attention(*batch.arguments, scale=0.125, sliding_window=None, out=torch.zeros_like(batch.query), derived=Derived(), **told)


def test_batches_of_all_sizes_share_one_compilation(batch_of):
    """Batch size, lengths and the width of the block table are ordinary arguments; decoding and mixed batches are two shapes."""
    for requests, width in ((2, 8), (1, 8), (3, 7), (5, 16), (16, 5), (33, 6)):
        attend(batch_of, COMPILED, [1] * requests, [17 * requests % 60 + 1] * requests, width)
    assert count(paged_attention_kernel) == 1
    for query_lens, seq_lens in (([5], [9]), ([17, 1], [40, 3]), ([1, 1, 16], [1, 2, 33])):
        attend(batch_of, COMPILED, query_lens, seq_lens, 8)
    assert count(paged_attention_kernel) == 2
    assert count(reduce_splits_kernel) == 0


def test_splits_share_one_compilation_too(batch_of):
    for requests, width in ((2, 8), (1, 8), (3, 7), (16, 5)):
        attend(batch_of, IN_SPLITS, [1] * requests, [60] * requests, width)
    assert (count(paged_attention_kernel), count(reduce_splits_kernel)) == (1, 1)


def test_a_launch_that_is_asked_for_its_accounts(batch_of):
    """The buffers fit the arguments; nothing ran, so nothing was written down."""
    for launcher in (COMPILED, IN_SPLITS):
        witness, progress = kernels.Witness(), kernels.Progress()
        attend(batch_of, launcher, [1, 1], [60, 3], 8, witness=witness, progress=progress)
        assert witness.launches[0].programs == ()
        assert all(lane.tiles == () for lane in progress.launches[0].lanes)
    assert count(paged_attention_kernel) == 2


def test_what_moves_keys_and_values_is_compiled_once():
    generator = torch.Generator().manual_seed(0)
    caches = [torch.zeros(32, 16, 3, 64, dtype=torch.bfloat16) for _ in range(2)]
    for num_tokens, num_reqs, width in ((1, 1, 4), (2, 2, 5), (7, 3, 4), (16, 4, 16), (33, 5, 3)):
        key, value = torch.zeros(2, num_tokens, 3, 64, dtype=torch.bfloat16)
        slots = torch.randperm(512, generator=generator)[:num_tokens]
        COMPILED.reshape_and_cache(key, value, *caches, slots, Derived(), None)
        starts = torch.linspace(0, num_tokens, num_reqs + 1).int()
        table = torch.zeros(num_reqs, width, dtype=torch.int32)
        COMPILED.compute_slot_mapping(
            starts,
            torch.zeros(num_tokens, dtype=torch.int64),
            table,
            torch.zeros(num_tokens + 9, dtype=torch.int64),
            block_size=16,
            kernel_block_size=16,
            cp_world_size=1,
            cp_rank=0,
            cp_interleave=1,
        )
        COMPILED.copy_blocks([caches[0]], [caches[1]], torch.arange(2 * num_reqs).view(num_reqs, 2))
    assert (count(reshape_and_cache_kernel), count(slot_mapping_kernel), count(copy_pages_kernel)) == (1, 1, 1)
    with kernels.recorded_launches() as launches:
        COMPILED.copy_blocks([caches[0]], [caches[1]], torch.tensor([[1, 2], [2, 3]]))  # one page is read and written: through a buffer
    assert [(launch.constants["GATHER"], launch.constants["SCATTER"]) for launch in launches] == [(True, False), (False, True)]
    assert count(copy_pages_kernel) == 3


def test_warps_are_those_of_the_configuration(batch_of):
    with kernels.recorded_launches() as launches:
        attend(batch_of, COMPILED, [1], [17], 8)
    assert (launches[0].num_warps, launches[0].num_stages) == (4, 5)
    (cache,) = paged_attention_kernel.device_caches.values()
    (compiled,) = cache[0].values()
    assert (compiled.metadata.num_warps, compiled.metadata.num_stages) == (4, 5)
    assert "wgmma" not in compiled.asm["ptx"]
    assert "mma.sync" in compiled.asm["ptx"]
