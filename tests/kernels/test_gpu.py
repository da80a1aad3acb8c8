"""The compiled kernels on a CUDA device, against the reference on the same device."""

from __future__ import annotations

import pytest
import torch

import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sliding_window", [None, 5, 512])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (8, 8, 128), (8, 1, 80)])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1] * 5, [700, 3, 64, 65, 1]), ([300, 1, 17, 0, 1], [900, 40, 17, 9, 1])])
def test_paged_attention(batch_of, query_lens, seq_lens, num_q_heads, num_kv_heads, head_dim, sliding_window, dtype, tolerance):
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, "padding_tokens": 2}
    batch = batch_of(query_lens, seq_lens, block_size=16, **shape)
    arguments = [tensor.cuda() for tensor in batch.arguments]
    results = [
        kernels.paged_attention(*arguments, scale=head_dim**-0.5, sliding_window=sliding_window, backend=backend)
        for backend in ("torch", kernels.choose_backend(device="cuda"))
    ]
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)


def test_slots_writes_and_copies():
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 1, 40, 40, 47], dtype=torch.int32).cuda()
    positions = torch.cat([torch.tensor([33]), torch.arange(39), torch.arange(20, 27)]).cuda()
    table = torch.randperm(64, generator=generator)[:16].view(4, 4).int().cuda()
    found = {}
    key, value = torch.randn(47, 3, 40, device="cuda"), torch.randn(47, 3, 40, device="cuda")
    first_keys, first_values = torch.randn(64, 16, 3, 40, device="cuda"), torch.randn(64, 16, 3, 40, device="cuda")
    pairs = torch.tensor([[1, 2], [2, 3], [5, 4], [4, 5]]).cuda()
    for backend in ("torch", "triton"):
        mapping = torch.full((3000,), 9, dtype=torch.int64, device="cuda")
        kernels.compute_slot_mapping(starts, positions, table, mapping, block_size=16, backend=backend)
        keys, values = first_keys.clone(), first_values.clone()
        kernels.reshape_and_cache(key, value, keys, values, mapping[:50].contiguous()[:47], backend=backend)
        kernels.copy_blocks([keys], [values], pairs, backend=backend)
        found[backend] = (mapping, keys, values)
    for reference, compiled in zip(*found.values(), strict=True):
        assert torch.equal(compiled, reference)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_the_account_of_compiled_kernels_is_what_the_interpreter_sees(batch_of, sliding_window):
    """One query per request, so that both have one lane for each request and KV head."""
    batch = batch_of([1] * 4, [70, 3, 64, 1], block_size=16, num_q_heads=6, num_kv_heads=2, head_dim=32)
    slots = torch.tensor([17, -1, 40, 3])
    key = torch.randn(4, 2, 32)
    seen = []
    for device, backend in (("cpu", "interpret"), ("cuda", "triton")):
        witness = kernels.Witness()
        arguments = [tensor.to(device) for tensor in batch.arguments]
        kernels.paged_attention(*arguments, scale=0.2, sliding_window=sliding_window, witness=witness, backend=backend)
        kernels.reshape_and_cache(key.to(device), key.to(device), *arguments[1:3], slots.to(device), witness=witness, backend=backend)
        kernels.copy_blocks([arguments[1]], [arguments[2]], torch.tensor([[1, 2], [2, 3]], device=device), witness=witness, backend=backend)
        told = [program for launch in witness.launches for program in launch.programs]
        seen.append({(p.tokens, p.kv_heads, p.key_slots_read, p.value_slots_read, p.key_slots_written, p.value_slots_written) for p in told})
    assert seen[0] == seen[1]
