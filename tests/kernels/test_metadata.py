"""Metadata of a batch: shared by the layers of a step it changes no result, and it refuses the tensors of another step."""

from __future__ import annotations

import pytest
import torch

import kernels

BACKENDS = ["torch", "interpret"]


def _metadata(batch, slot_mapping: torch.Tensor) -> kernels.AttentionMetadata:
    return kernels.AttentionMetadata(block_table=batch.block_table, query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, slot_mapping=slot_mapping)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [7, 20]), ([5, 1, 0], [9, 14, 3])])
def test_layers_that_share_metadata_get_what_they_would_get_alone(batch_of, query_lens, seq_lens, backend):
    """Two layers with other caches and other windows, as in a model that mixes both kinds of attention."""
    layers = [batch_of(query_lens, seq_lens, seed=seed) for seed in (0, 1)]
    shared = layers[0].arguments[3:]
    caches = [(layer.query, layer.key_cache.nan_to_num(), layer.value_cache.nan_to_num()) for layer in layers]
    metadata = _metadata(layers[0], torch.zeros(0, dtype=torch.int64))
    for window in (None, 3):
        for arguments in caches:
            alone = kernels.paged_attention(*arguments, *shared, scale=0.3, sliding_window=window, backend=backend)
            together = kernels.paged_attention(*arguments, *shared, scale=0.3, sliding_window=window, metadata=metadata, backend=backend)
            assert torch.equal(together, alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [[9, 2, 14], [9, -1, 14]])
def test_layers_that_share_metadata_write_the_same_slots(batch_of, slots, backend):
    """R8.5: -1 stays unwritten in every layer."""
    slot_mapping = torch.tensor(slots)
    metadata = _metadata(batch_of([1], [4]), slot_mapping)
    for _ in range(2):
        key, value = torch.rand(3, 2, 8) + 1, torch.rand(3, 2, 8) + 1
        key_cache, value_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
        kernels.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, metadata=metadata, backend=backend)
        for rows, cache in ((key, key_cache), (value, value_cache)):
            expected = torch.zeros(16, 2, 8)
            for row, slot in zip(rows, slots, strict=True):
                if slot >= 0:
                    expected[slot] = row
            assert torch.equal(cache.view(16, 2, 8), expected)


def test_metadata_of_another_step_is_refused(batch_of):
    batch = batch_of([1], [4])
    metadata = _metadata(batch, torch.tensor([1]))
    with pytest.raises(ValueError, match="seq_lens is not the tensor that the metadata was made from"):
        kernels.paged_attention(*batch.arguments[:5], batch.seq_lens.clone(), scale=1.0, metadata=metadata, backend="torch")
    rows = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="slot_mapping is not the tensor"):
        kernels.reshape_and_cache(rows, rows, batch.key_cache, batch.value_cache, torch.tensor([1]), metadata=metadata, backend="torch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, "seq_lens names 3 requests"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is torch.int32"),
    ],
)
def test_metadata_names_what_does_not_fit(batch_of, change, message):
    batch = batch_of([3, 1], [7, 10])
    arguments = {"block_table": batch.block_table, "query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens, "slot_mapping": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=message):
        kernels.AttentionMetadata(**arguments | change)


def test_every_layer_is_checked(batch_of):
    """The first layer's caches in order say nothing about the second's."""
    batch = batch_of([1], [4])
    metadata = _metadata(batch, torch.tensor([1]))
    kernels.paged_attention(*batch.arguments, scale=1.0, metadata=metadata, backend="torch")
    with pytest.raises(ValueError, match="caches have shapes"):
        kernels.paged_attention(batch.query, batch.key_cache, batch.value_cache[:1], *batch.arguments[3:], scale=1.0, metadata=metadata, backend="torch")
