"""The reference's shortcut for several short decodes, against a dense float64 computation and against the reference's own way, request by request."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import reference, reference_decodes

SHAPES = [(9, 3, 64), (4, 1, 256), (4, 4, 8), (6, 2, 24)]


def attend(batch, sliding_window=None):
    return kernels.paged_attention(*batch.arguments, scale=0.3, sliding_window=sliding_window, backend="torch")


@pytest.fixture
def joined(monkeypatch):
    """How many requests were gathered at once, per call."""
    calls = []
    shortcut = reference_decodes.attend
    monkeypatch.setattr(reference_decodes, "attend", lambda decodes, *rest, **named: (calls.append(len(decodes.rows)), shortcut(decodes, *rest, **named)))
    return calls


@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_against_dense_and_one_by_one(batch_of, dense, joined, monkeypatch, num_q_heads, num_kv_heads, head_dim, sliding_window):
    """Every slot that no request owns is not-a-number, so reading one would show."""
    batch = batch_of([1, 5, 1, 1, 0], [7, 9, 1, 30, 3], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    out = attend(batch, sliding_window)
    assert joined == [3]
    torch.testing.assert_close(out.double(), dense(batch, 0.3, sliding_window), atol=2e-6, rtol=1e-5)
    monkeypatch.setattr(reference, "_joined", lambda requests, *_: (None, requests))
    torch.testing.assert_close(attend(batch, sliding_window), out, atol=2e-6, rtol=1e-5)
    assert joined == [3]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_other_precisions(batch_of, dense, joined, dtype, tolerance):
    batch = batch_of([1, 1], [12, 7], dtype=dtype)
    torch.testing.assert_close(attend(batch).double(), dense(batch, 0.3), atol=tolerance, rtol=tolerance)
    assert joined == [2]


@pytest.mark.parametrize(("query_lens", "seq_lens", "expected"), [([1], [30], 1), ([1, 1, 1], [7, 30, 30], 3), ([4, 1], [4, 9], 1)])
def test_alone_or_the_whole_batch(batch_of, dense, joined, query_lens, seq_lens, expected):
    batch = batch_of(query_lens, seq_lens)
    torch.testing.assert_close(attend(batch).double(), dense(batch, 0.3), atol=2e-6, rtol=1e-5)
    assert joined == [expected]


def test_long_requests_go_one_by_one(batch_of, joined):
    """Two KV heads of 16 numbers each, so that a token has 32."""
    batch = batch_of([1, 1], [reference_decodes.MAX_ELEMENTS // 64 + 1, 3], block_size=16)
    attend(batch)
    assert joined == []


def test_no_request_reads_the_keys_of_another(batch_of):
    """The shorter requests are filled up with a slot of their own."""
    batch = batch_of([1, 1, 1], [3, 11, 6])
    requests = reference._requests(*(batch.arguments[i] for i in (3, 4, 5)), 4, None)
    decodes = reference_decodes.join([r.start for r in requests], [r.slots for r in requests])
    for request, slots in zip(requests, decodes.slots.view(3, decodes.longest), strict=True):
        assert set(slots.tolist()) == set(request.slots.tolist())
