"""The physical keys and values: two tensors per layer, cut into blocks, and what they cost in bytes (R8.7, F1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.errors import InvalidInput
from kernels import Backend, Witness, copy_blocks


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: `num_kv_heads` keys and as many values of `head_dim` numbers. `group_id`: its KV-cache group, and
    `sliding_window` the window in tokens for which that group keeps blocks (None: it keeps all of them)."""

    num_kv_heads: int
    head_dim: int
    group_id: int = 0
    sliding_window: int | None = None


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

    With one group the same block id names a page in every layer. With several, the i-th layers of all groups share their memory: a block belongs to one group
    at a time, and its id names a page in each layer of that group. `storage_of[layer]` is the number of the memory that a layer lies in; two layers with the
    same number belong to different groups.

    Raises InvalidInput when a size is not positive, when the pages of two groups are not equally large, or when the memory cannot be had. vLLM:
    KVCacheTensor.shared_by; here: keys and values in tensors of their own.
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
        self.storage_of = _storages(self.layers)
        shapes = [(num_blocks, block_sizes[layer.group_id], layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.one_layer_of = sorted({storage: layer for layer, storage in reversed(list(enumerate(self.storage_of)))}.values())
        """Of each memory the first layer that lies in it: what works on whole pages does it there, once, for all layers that share the memory."""
        for layer, storage in enumerate(self.storage_of):
            first = self.storage_of.index(storage)
            if prod(shapes[layer]) != prod(shapes[first]):
                raise InvalidInput(
                    f"Layers {first} and {layer} are to share memory, but a block of one takes {prod(shapes[first][1:])} numbers and of the other "
                    f"{prod(shapes[layer][1:])}; give the groups block sizes that make them equal."
                )
        try:
            self.key_caches = _views(self.storage_of, shapes, dtype, device)
            self.value_caches = _views(self.storage_of, shapes, dtype, device)
        except RuntimeError as error:  # torch has no narrower type for the CPU allocator's failure
            size = sum(2 * prod(shapes[layer]) for layer in self.one_layer_of) * dtype.itemsize
            raise InvalidInput(
                f"{num_blocks} blocks of {', '.join(map(str, block_sizes))} tokens take {size / 2**20:.0f} MiB of keys and values, "
                "which this machine cannot give; ask for fewer blocks."
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages; memory that layers of several groups share counts once."""
        return sum(2 * self.key_caches[layer].numel() * self.key_caches[layer].element_size() for layer in self.one_layer_of)

    def copy_blocks(
        self, block_pairs: Sequence[tuple[int, int]], backend: Backend, layers: Sequence[int] | None = None, witness: Witness | None = None
    ) -> None:
        """Copy whole pages (source, destination) in `layers`, no two of which may share memory, None for all memory; all sources are read before any
        destination is written (R6.7): a second copy of the same memory could read what the first has written. `witness` is told of one launch per layer."""
        pairs = torch.tensor(list(block_pairs), dtype=torch.int64, device=self.key_caches[0].device)
        wanted = self.one_layer_of if layers is None else layers
        copy_blocks([self.key_caches[i] for i in wanted], [self.value_caches[i] for i in wanted], pairs, witness=witness, backend=backend)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrite the pages of `block_ids` with zeros in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.key_caches[0].device)
        for layer in self.one_layer_of:
            self.key_caches[layer].index_fill_(0, index, 0)
            self.value_caches[layer].index_fill_(0, index, 0)


def _storages(layers: Sequence[LayerShape]) -> tuple[int, ...]:
    """Per layer its place within its group: layers of different groups with the same place share memory."""
    seen: Counter[int] = Counter()
    places: list[int] = []
    for layer in layers:
        places.append(seen[layer.group_id])
        seen[layer.group_id] += 1
    return tuple(places)


def _views(storage_of: Sequence[int], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """One zeroed tensor per storage, seen with the shape of each layer that lies in it."""
    storages: dict[int, torch.Tensor] = {}
    for storage, shape in zip(storage_of, shapes, strict=True):
        if storage not in storages:
            storages[storage] = torch.zeros(prod(shape), dtype=dtype, device=device)
    return [storages[storage].view(shape) for storage, shape in zip(storage_of, shapes, strict=True)]
