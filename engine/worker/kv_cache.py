"""The physical keys and values: two tensors per layer, cut into blocks, and what they cost in bytes (R8.7, F1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import InvalidInput
from kernels import Backend, Witness, copy_blocks


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: `num_kv_heads` keys and as many values of `head_dim` numbers. `group_id`: its KV-cache group."""

    num_kv_heads: int
    head_dim: int
    group_id: int = 0


def page_size_bytes(block_size: int, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    """Bytes of one block in one full-attention layer: block_size * num_kv_heads * (head_dim of keys + head_dim of values) * bytes (R8.7).
    vLLM: FullAttentionSpec.page_size_bytes."""
    return block_size * num_kv_heads * 2 * head_dim * element_size


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    """Bytes that one token's keys and values take in all layers (F1)."""
    return 2 * num_layers * num_kv_heads * head_dim * element_size


def num_blocks_for_memory(available_bytes: int, page_bytes: int, layers_per_group: int) -> int:
    """How many block ids fit into `available_bytes`: a block id owns one page in each layer of a group (R8.7). vLLM: get_num_blocks."""
    return max(available_bytes // page_bytes // layers_per_group, 0)


class KVCache:
    """`key_caches[layer]` and `value_caches[layer]`: [num_blocks, block_size, num_kv_heads, head_dim], zeroed, with the block size of the layer's group.

    The same block id names a page in every layer. Raises InvalidInput when a size is not positive or the memory cannot be had.
    """

    def __init__(
        self, *, num_blocks: int, block_sizes: Sequence[int], layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise InvalidInput(f"num_blocks is {num_blocks}, but the pool needs at least 1 block (block 0 is the null block); give a larger num_blocks.")
        for block_size in block_sizes:
            if block_size < 1:
                raise InvalidInput(f"block_size is {block_size}, but a block holds at least 1 token; give a block_size of 1 or more.")
        self.num_blocks = num_blocks
        self.block_sizes = tuple(block_sizes)
        self.layers = tuple(layers)
        shapes = [(num_blocks, block_sizes[layer.group_id], layer.num_kv_heads, layer.head_dim) for layer in layers]
        try:
            self.key_caches = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            self.value_caches = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        except RuntimeError as error:  # torch has no narrower type for the CPU allocator's failure
            size = sum(2 * num_blocks * s[1] * s[2] * s[3] for s in shapes) * dtype.itemsize
            raise InvalidInput(
                f"{num_blocks} blocks of {', '.join(map(str, block_sizes))} tokens take {size / 2**20:.0f} MiB of keys and values, "
                "which this machine cannot give; ask for fewer blocks."
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(t.numel() * t.element_size() for t in (*self.key_caches, *self.value_caches))

    def copy_blocks(
        self, block_pairs: Sequence[tuple[int, int]], backend: Backend, layers: Sequence[int] | None = None, witness: Witness | None = None
    ) -> None:
        """Copy whole pages (source, destination) in `layers`, None for all; all sources are read before any destination is written (R6.7). `witness` is told of
        one launch per layer."""
        pairs = torch.tensor(list(block_pairs), dtype=torch.int64, device=self.key_caches[0].device)
        wanted = range(len(self.layers)) if layers is None else layers
        copy_blocks([self.key_caches[i] for i in wanted], [self.value_caches[i] for i in wanted], pairs, witness=witness, backend=backend)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrite the pages of `block_ids` with zeros in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.key_caches[0].device)
        for cache in (*self.key_caches, *self.value_caches):
            cache.index_fill_(0, index, 0)
