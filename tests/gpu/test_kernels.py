"""The compiled kernels on a CUDA device: against float64, against the reference, and their own accounts against what the interpreter sees."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.backend import GpuTiles
from kernels.compiled import _launch
from kernels.launch import Launcher
from kernels.metadata import Derived
from tests.ragged import Batch, dense_attention, make_batch

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Relative to the largest number of the result: over long contexts random values average to nearly nothing."""
HEADS = [(9, 3, 64), (4, 1, 256), (8, 2, 128), (8, 8, 128), (8, 1, 80), (4, 4, 32), (4, 2, 8), (6, 2, 24), (64, 2, 64)]
"""Query heads, KV heads, head size: SmolLM2's, Gemma's, Llama's group, no group, sizes that are no power of two or below a tensor core's, a group of 32."""
BATCHES = {
    "decodes": ([1] * 5, [700, 3, 64, 65, 1]),
    "one key": ([1], [1]),
    "prefills and decodes": ([300, 1, 17, 0, 1], [900, 40, 17, 9, 1]),
    "a chunk": ([130], [400]),
}


def on_gpu(batch: Batch) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in batch.arguments]


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (result.double() - expected).abs().max()
    assert float(difference) <= TOLERANCES[result.dtype] * float(expected.abs().max())


def launched_in_splits(splits: int) -> Launcher:
    return Launcher(run=_launch, interpreted=False, own_account=True, gpu_tiles=GpuTiles(splits=splits))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sliding_window", [None, 5, 512])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("name", BATCHES)
def test_paged_attention_against_the_reference(name, num_q_heads, num_kv_heads, head_dim, sliding_window, dtype):
    """The reference computes in float32; NaN in every slot that no query may see must not reach the result."""
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, "padding_tokens": 2}
    arguments = on_gpu(make_batch(*BATCHES[name], block_size=16, **shape))
    results = [
        kernels.paged_attention(*arguments, scale=head_dim**-0.5, sliding_window=sliding_window, backend=backend)
        for backend in ("torch", kernels.choose_backend(device="cuda"))
    ]
    close(results[1], results[0].double())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("sliding_window", [None, 9])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1] * 4, [70, 3, 33, 1]), ([20, 1, 7], [50, 12, 7])])
def test_paged_attention_against_float64(query_lens, seq_lens, sliding_window, block_size, dtype):
    batch = make_batch(query_lens, seq_lens, num_q_heads=6, num_kv_heads=2, head_dim=64, block_size=block_size, dtype=dtype)
    out = kernels.paged_attention(*on_gpu(batch), scale=0.125, sliding_window=sliding_window, backend="triton")
    close(out.cpu(), dense_attention(batch, 0.125, sliding_window))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("sliding_window", [None, 1, 300])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_split_keys(head_dim, sliding_window, splits, dtype):
    """Ragged lengths, fewer tiles than splits, one key, and a request without a query; a row of the batch that is nobody's stays as it was."""
    batch = make_batch([1, 1, 0, 1, 1], [900, 3, 8, 64, 1], num_q_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype, padding_tokens=1)
    out = torch.full_like(batch.query, 7.0).cuda()
    launched_in_splits(splits).paged_attention(*on_gpu(batch), scale=head_dim**-0.5, sliding_window=sliding_window, out=out, derived=Derived())
    close(out[:4].cpu(), dense_attention(batch, head_dim**-0.5, sliding_window)[:4])
    assert (out[4:] == 7.0).all()


def test_a_long_request_is_split_without_being_asked():
    batch = make_batch([1], [5000], num_q_heads=4, num_kv_heads=1, head_dim=128, block_size=16, dtype=torch.bfloat16)
    with kernels.recorded_launches() as launches:
        out = kernels.paged_attention(*on_gpu(batch), scale=128**-0.5, backend="triton")
    assert [launch.kernel for launch in launches] == ["paged_attention_kernel", "reduce_splits_kernel"]
    assert launches[0].grid[1] > 4
    close(out.cpu(), dense_attention(batch, 128**-0.5))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 40), (3, 64), (8, 128), (1, 256)])
def test_slots_writes_and_copies(num_kv_heads, head_dim, dtype):
    """Bit by bit what the reference does: chains and swaps of pages included, with the pairs in the GPU's memory and on the host."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 1, 40, 40, 47], dtype=torch.int32).cuda()
    positions = torch.cat([torch.tensor([33]), torch.arange(39), torch.arange(20, 27)]).cuda()
    table = torch.randperm(64, generator=generator)[:16].view(4, 4).int().cuda()
    found = {}
    key, value = torch.randn(2, 47, num_kv_heads, head_dim, device="cuda").to(dtype)
    first_keys, first_values = torch.randn(2, 64, 16, num_kv_heads, head_dim, device="cuda").to(dtype)
    chains, apart = torch.tensor([[1, 2], [2, 3], [5, 4], [4, 5]]), torch.tensor([[7, 8], [7, 9], [10, 11]])
    for backend in ("torch", "triton"):
        mapping = torch.full((3000,), 9, dtype=torch.int64, device="cuda")
        kernels.compute_slot_mapping(starts, positions, table, mapping, block_size=16, backend=backend)
        keys, values = first_keys.clone(), first_values.clone()
        kernels.reshape_and_cache(key, value, keys, values, mapping[:50].contiguous()[:47], backend=backend)
        for pairs in (chains, apart, chains.cuda(), apart.cuda()):
            kernels.copy_blocks([keys], [values], pairs, backend=backend)
        found[backend] = (mapping, keys, values)
    for reference, compiled in zip(*found.values(), strict=True):
        assert torch.equal(compiled, reference)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sliding_window", [None, 5])
def test_the_account_of_compiled_kernels_is_what_the_interpreter_sees(sliding_window, splits):
    """One query per request and the same tiles, so that both have the same lanes."""
    batch = make_batch([1] * 4, [70, 3, 64, 1], block_size=16, num_q_heads=6, num_kv_heads=2, head_dim=32)
    slots = torch.tensor([17, -1, 40, 3])
    key = torch.randn(4, 2, 32)
    seen = []
    for device, backend in (("cpu", kernels.interpreted_like_gpu(splits=splits)), ("cuda", "triton")):
        witness = kernels.Witness()
        arguments = [tensor.to(device) for tensor in batch.arguments]
        if device == "cpu":
            kernels.paged_attention(*arguments, scale=0.2, sliding_window=sliding_window, witness=witness, backend=backend)
        else:
            out = torch.zeros_like(arguments[0])
            launched_in_splits(splits).paged_attention(*arguments, scale=0.2, sliding_window=sliding_window, out=out, derived=Derived(), witness=witness)
        kernels.reshape_and_cache(key.to(device), key.to(device), *arguments[1:3], slots.to(device), witness=witness, backend=backend)
        kernels.copy_blocks([arguments[1]], [arguments[2]], torch.tensor([[1, 2], [2, 3]], device=device), witness=witness, backend=backend)
        told = [program for launch in witness.launches for program in launch.programs]
        seen.append({(p.tokens, p.kv_heads, p.key_slots_read, p.value_slots_read, p.key_slots_written, p.value_slots_written) for p in told})
    assert seen[0] == seen[1]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1, 1], [300, 5, 64]), ([40, 1, 9], [200, 33, 9])])
def test_the_softmax_grows_on_the_gpu_as_in_the_interpreter(query_lens, seq_lens, splits):
    batch = make_batch(query_lens, seq_lens, block_size=16, num_q_heads=6, num_kv_heads=2, head_dim=64)
    grown = [kernels.Progress(), kernels.Progress()]
    kernels.paged_attention(*batch.arguments, scale=0.2, progress=grown[0], backend=kernels.interpreted_like_gpu(splits=splits))
    arguments = on_gpu(batch)
    launched_in_splits(splits).paged_attention(
        *arguments, scale=0.2, sliding_window=None, out=torch.zeros_like(arguments[0]), derived=Derived(), progress=grown[1]
    )
    interpreted, compiled = (progress.launches[0] for progress in grown)
    assert (interpreted.grid, interpreted.tile_size) == (compiled.grid, compiled.tile_size)
    for one, other in zip(interpreted.lanes, compiled.lanes, strict=True):
        assert (one.program, one.tokens, one.kv_head, one.split, one.tiles) == (other.program, other.tokens, other.kv_head, other.split, other.tiles)
        for row, same_row in zip(one.rows, other.rows, strict=True):
            assert same_row.maxima == pytest.approx(row.maxima, rel=1e-4, abs=1e-4)
            assert same_row.totals == pytest.approx(row.totals, rel=1e-4)


def test_no_new_compilation_for_another_batch():
    """Batch size, width of the block table and lengths are ordinary arguments: the same compiled kernel serves them all."""
    from kernels.triton_attention import paged_attention_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in paged_attention_kernel.device_caches.values())

    def attend(requests: int, width: int) -> None:
        batch = make_batch([1] * requests, [17] * requests, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16)
        batch.block_table = torch.nn.functional.pad(batch.block_table, (0, width - batch.block_table.shape[1]))
        kernels.paged_attention(*on_gpu(batch), scale=0.125, backend="triton")

    attend(2, 8)
    before = compiled()
    for requests, width in ((1, 8), (3, 7), (5, 16), (16, 4), (33, 5)):
        attend(requests, width)
    assert compiled() == before
