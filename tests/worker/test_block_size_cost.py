"""The kernels' time per block size: what is launched is right, and bad wishes are refused."""

from __future__ import annotations

import pytest
import torch

import kernels
from engine.errors import InvalidInput
from engine.worker.block_size_cost import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, _launches, measure_block_sizes

Recorded = list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_what_is_timed_is_attention_over_scattered_blocks(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    """The launch equals torch's own attention over the tokens that the block table names."""
    seen: Recorded = []
    real = kernels.paged_attention

    def spy(*tensors: torch.Tensor, **settings: object) -> torch.Tensor:
        out = real(*tensors, **settings)  # type: ignore[arg-type]
        seen.append((tensors, out))
        return out

    monkeypatch.setattr(kernels, "paged_attention", spy)
    attend, _ = _launches(block_size, (5, 40, 300), "torch")
    attend()
    (query, keys, values, table, _, lengths), out = seen[0]
    assert query.shape == (3, NUM_HEADS, HEAD_DIM)
    assert lengths.tolist() == [5, 40, 300]
    for row, length in enumerate(lengths.tolist()):
        blocks = table[row, : -(-length // block_size)].long()
        assert len(set(blocks.tolist())) == len(blocks)
        key, value = (cache[blocks].reshape(-1, NUM_KV_HEADS, HEAD_DIM)[:length].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for cache in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(query[row].unsqueeze(1), key.transpose(0, 1), value.transpose(0, 1)).squeeze(1)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def test_what_is_copied_is_one_block_that_no_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []
    pairs: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "paged_attention", lambda query, keys, values, table, *rest, **settings: tables.append(table))
    monkeypatch.setattr(kernels, "copy_blocks", lambda keys, values, block_pairs, backend: pairs.append(block_pairs))
    attend, copy = _launches(4, (9, 17), "torch")
    attend()
    copy()
    ((source, destination),) = pairs[0].tolist()
    assert source != destination
    used = {*tables[0][0, :3].tolist(), *tables[0][1, :5].tolist()}
    assert not used & {source, destination}


@pytest.mark.parametrize("backend", ["torch", "interpret"])
def test_every_size_gets_two_times_and_progress_ends_at_one(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.block_size_cost.SECONDS", 0.0)
    told: list[float] = []
    costs = measure_block_sizes((1, 16), (7, 30), backend, told.append)
    assert [cost.block_size for cost in costs] == [1, 16]
    assert all(0 < cost.attention_seconds < 60 and 0 < cost.copy_seconds < 60 for cost in costs)
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize(("sizes", "lengths"), [((), (4,)), ((0,), (4,)), ((16,), ()), ((16,), (0,))])
def test_what_cannot_be_measured_is_refused(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        measure_block_sizes(sizes, lengths, "torch")
    with pytest.raises(kernels.UnknownBackend):
        measure_block_sizes((16,), (4,), "abacus")
