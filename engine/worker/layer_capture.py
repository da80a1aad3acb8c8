"""What one attention layer is given in a forward pass, put aside before its keys and values are written: what a close-up launches the kernels on again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionMetadata


@dataclass(frozen=True)
class LayerInputs:
    """Copies on the CPU, so that whatever runs on them leaves the run alone.

    `query`: [num_tokens, num_q_heads, head_dim]; `key`, `value`: [num_tokens, num_kv_heads, head_dim]; `key_cache`, `value_cache`: [num_blocks, block_size,
    num_kv_heads, head_dim] as they were before this step's keys and values came, with the contents of the pages that the batch's block tables name, zeros
    elsewhere; `block_table`: int32 [num_reqs, width]; `query_start_loc`: int32 [num_reqs + 1]; `seq_lens`: int32 [num_reqs]; `slot_mapping`: int64
    [num_tokens]; `sliding_window` in tokens (None: all are seen).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    scale: float
    sliding_window: int | None
    group_id: int

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_tokens]: the position of each token within its request, whose last ones the batch has."""
        lengths = self.query_start_loc.diff().long()
        first = torch.repeat_interleave(self.seq_lens.long() - lengths - self.query_start_loc[:-1].long(), lengths)
        return first + torch.arange(self.query.shape[0])


class LayerCapture:
    """Keeps what attention layer `layer` is given (None: the first that comes by), of the latest forward pass: `inputs` (None before the first).
    `attention_layers`: all layers that came by so far."""

    def __init__(self, layer: int | None) -> None:
        self.layer = layer
        self.inputs: LayerInputs | None = None
        self.attention_layers: set[int] = set()

    def keep(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        group_id: int,
    ) -> None:
        """Called by every attention layer before it writes; shapes as in `LayerInputs`. Copies only the pages that the kernels may come to."""
        self.attention_layers.add(layer)
        if self.layer is None:
            self.layer = layer
        if layer != self.layer:
            return
        block_size = key_cache.shape[1]
        columns = [-(-seq_len // block_size) for seq_len in metadata.seq_lens.tolist()]
        named = sorted({block_id for row, used in zip(metadata.block_table.tolist(), columns, strict=False) for block_id in row[:used]})
        self.inputs = LayerInputs(
            query=_copy(query),
            key=_copy(key),
            value=_copy(value),
            key_cache=_pages(key_cache, named),
            value_cache=_pages(value_cache, named),
            block_table=_copy(metadata.block_table),
            query_start_loc=_copy(metadata.query_start_loc),
            seq_lens=_copy(metadata.seq_lens),
            slot_mapping=_copy(metadata.slot_mapping),
            scale=scale,
            sliding_window=sliding_window,
            group_id=group_id,
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)  # with the strides that it has, on which kernels' constants depend


def _pages(cache: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """A cache as large as `cache`, of which only these pages are filled; the operating system gives no memory for pages of zeros that nobody touches."""
    pages = torch.zeros(cache.shape, dtype=cache.dtype)
    pages[block_ids] = cache[block_ids].to("cpu")
    return pages
