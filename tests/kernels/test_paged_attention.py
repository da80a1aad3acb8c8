"""Paged attention: reference and interpreted kernel against a dense float64 computation (the PagedAttention paper, section 4.1)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels

CPU_BACKENDS = ["torch", "interpret"]
BATCHES = {
    "one decode": ([1], [7]),
    "one prefill": ([9], [9]),
    "chunk after a cached prefix": ([5], [14]),
    "decodes of different lengths": ([1, 1, 1], [3, 17, 8]),
    "prefill and decode mixed": ([5, 1, 8, 1, 3], [5, 12, 21, 1, 4]),
    "a request without queries": ([2, 0, 1], [6, 5, 9]),
    "longer than one query block": ([70, 1], [75, 40]),
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_attention(batch_of, dense, name, block_size, sliding_window, backend):
    """Poison (NaN) in every slot that no query may see must not reach the result."""
    query_lens, seq_lens = BATCHES[name]
    batch = batch_of(query_lens, seq_lens, block_size=block_size)
    out = kernels.paged_attention(*batch.arguments, scale=0.3, sliding_window=sliding_window, backend=backend)
    torch.testing.assert_close(out.double(), dense(batch, 0.3, sliding_window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (4, 4, 8), (6, 2, 24), (8, 1, 80)])
def test_head_layouts(batch_of, dense, num_q_heads, num_kv_heads, head_dim, backend):
    """Query head h reads KV head h // group; neither the group nor the head size needs to be a power of two."""
    batch = batch_of([3, 1, 6], [10, 18, 6], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    scale = head_dim**-0.5
    out = kernels.paged_attention(*batch.arguments, scale=scale, backend=backend)
    torch.testing.assert_close(out.double(), dense(batch, scale), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(batch_of, dense, dtype, tolerance, backend):
    """Inputs are rounded, sums are not: the error is that of the last rounding. An interpreted bfloat16 dot would be off by billions."""
    batch = batch_of([4, 1], [12, 30], head_dim=32, dtype=dtype)
    out = kernels.paged_attention(*batch.arguments, scale=0.2, backend=backend)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(batch, 0.2), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sliding_window", [None, 5, 70])
def test_many_programs_and_many_tiles(batch_of, dense, monkeypatch, sliding_window):
    """As on a GPU: one lane per program, several tiles per lane, several query blocks per request; the online softmax must carry over."""
    monkeypatch.setattr("kernels.launch_attention.INTERPRETED_ELEMENTS", 1)
    monkeypatch.setattr("kernels.launch_attention.INTERPRETED_BLOCK_Q", 3)
    batch = batch_of([1, 7, 4], [200, 150, 4], num_q_heads=6, num_kv_heads=2)
    out = kernels.paged_attention(*batch.arguments, scale=0.9, sliding_window=sliding_window, backend="interpret")
    torch.testing.assert_close(out.double(), dense(batch, 0.9, sliding_window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_bfloat16_result_rounds_upwards_across_a_power_of_two(backend):
    """1.9995 is 2.0 in bfloat16; the interpreter's own cast drops the carry and makes it 1.0."""
    one = torch.ones(1, dtype=torch.int32)
    key_cache = torch.zeros(2, 2, 1, 16, dtype=torch.bfloat16)
    value_cache = torch.zeros_like(key_cache)
    value_cache[1, 0], value_cache[1, 1] = 2.0, 1.992188
    query = torch.ones(1, 1, 16, dtype=torch.bfloat16)
    key_cache[1, 0], key_cache[1, 1] = 0.25, 0.0
    table = torch.ones(1, 1, dtype=torch.int32)
    query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
    out = kernels.paged_attention(query, key_cache, value_cache, table, query_start_loc, one * 2, scale=1.0, backend=backend)
    assert out.flatten().tolist() == [2.0] * 16


def test_reference_in_float64_is_exact(batch_of, dense):
    batch = batch_of([5, 1, 8], [5, 12, 21], dtype=torch.float64)
    out = kernels.paged_attention(*batch.arguments, scale=0.3, backend="torch")
    torch.testing.assert_close(out, dense(batch, 0.3), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_padding_rows_of_out_are_left_alone(batch_of, dense, backend):
    batch = batch_of([2, 1], [5, 9], padding_tokens=3)
    out = torch.full_like(batch.query, 7.0)
    assert kernels.paged_attention(*batch.arguments, scale=0.3, out=out, backend=backend) is out
    torch.testing.assert_close(out[:3].double(), dense(batch, 0.3)[:3], atol=2e-6, rtol=1e-5)
    assert (out[3:] == 7.0).all()
    fresh = kernels.paged_attention(*batch.arguments, scale=0.3, backend=backend)
    assert (fresh[3:] == 0.0).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_padding_rows_survive_in_half_precision(batch_of, backend):
    batch = batch_of([1], [5], padding_tokens=2, dtype=torch.bfloat16)
    out = torch.full_like(batch.query, 1.5)
    kernels.paged_attention(*batch.arguments, scale=0.3, out=out, backend=backend)
    assert (out[1:] == 1.5).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_views_of_a_fused_projection(batch_of, dense, backend):
    """Query and out may be slices of wider tensors, as a fused QKV projection yields them; the caches may be interleaved K and V."""
    batch = batch_of([3, 1], [7, 10])
    wide = torch.zeros(4, 10, 16)
    wide[:, 2:6] = batch.query
    both = torch.stack([batch.key_cache, batch.value_cache], dim=1)
    out = torch.zeros(4, 4, 40)[:, :, :16]
    kernels.paged_attention(wide[:, 2:6], both[:, 0], both[:, 1], batch.block_table, batch.query_start_loc, batch.seq_lens, scale=0.3, out=out, backend=backend)
    torch.testing.assert_close(out.double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_transposed_heads(batch_of, dense, backend):
    """transformers hands over [heads, tokens, head_dim] seen as [tokens, heads, head_dim], and a last dimension that is not dense must work."""
    batch = batch_of([3, 1], [7, 10])
    query = batch.query.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    strided = torch.zeros(4, 4, 32)[:, :, ::2]
    out = kernels.paged_attention(query, *batch.arguments[1:], scale=0.3, out=strided, backend=backend)
    assert out is strided
    torch.testing.assert_close(out.double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_empty_batches(batch_of, backend):
    batch = batch_of([], [])
    assert kernels.paged_attention(*batch.arguments, scale=1.0, backend=backend).shape == (0, 4, 16)
    batch = batch_of([0, 0], [4, 2])
    assert kernels.paged_attention(*batch.arguments, scale=1.0, backend=backend).shape == (0, 4, 16)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_inputs_are_not_changed(batch_of, backend):
    batch = batch_of([3, 1], [7, 10])
    before = [tensor.clone() for tensor in batch.arguments]
    kernels.paged_attention(*batch.arguments, scale=0.3, backend=backend)
    for tensor, copy in zip(batch.arguments, before, strict=True):
        assert torch.equal(tensor.nan_to_num(nan=99.0), copy.nan_to_num(nan=99.0))


def test_reference_does_not_depend_on_the_rest_of_the_batch(batch_of):
    """Alone or in company, a request gets bit-identical rows, so a batch's composition cannot change its tokens."""
    batch = batch_of([5, 1, 8], [5, 12, 21])
    together = kernels.paged_attention(*batch.arguments, scale=0.3, backend="torch")
    alone = kernels.paged_attention(
        batch.query[5:6],
        batch.key_cache,
        batch.value_cache,
        batch.block_table[1:2],
        torch.tensor([0, 1], dtype=torch.int32),
        batch.seq_lens[1:2],
        scale=0.3,
        backend="torch",
    )
    assert torch.equal(together[5:6], alone)


@st.composite
def ragged(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=5))
    query_lens = [new for new, _ in requests]
    seq_lens = [max(1, new + cached) for new, cached in requests]
    group, num_kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (3, 3)]))
    return {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "num_q_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "block_size": draw(st.sampled_from([1, 3, 4, 16])),
        "padding_tokens": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(shape=ragged(), sliding_window=st.sampled_from([None, 1, 3, 16]))
def test_interpreted_kernel_equals_reference_on_any_batch(batch_of, shape, sliding_window):
    batch = batch_of(**shape)
    results = [kernels.paged_attention(*batch.arguments, scale=0.25, sliding_window=sliding_window, backend=backend) for backend in CPU_BACKENDS]
    torch.testing.assert_close(results[0], results[1], atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 3, 16)}, "multiple of 2 heads"),
        ({"query": torch.zeros(4, 4, 8)}, "must be"),
        ({"value_cache": torch.zeros(3, 4, 2, 8)}, "caches have shapes"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"block_table": torch.zeros(1, 5, dtype=torch.int32)}, "at least 2 rows"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, "seq_lens names 3 requests"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"out": torch.zeros(1, 4, 16)}, "out has shape"),
    ],
)
def test_wrong_shapes_are_named(batch_of, change, message):
    batch = batch_of([3, 1], [7, 10])
    names = ["query", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens"]
    arguments = dict(zip(names, batch.arguments, strict=True)) | {"scale": 0.3, "backend": "torch"} | change
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(**arguments)
