"""The physical keys, values and recurrent states: two memories per layer, cut into blocks, and what they cost in bytes (R8.7, F1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from engine.errors import EngineError, InvalidInput
from kernels import Backend, Witness, copy_blocks


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: `num_kv_heads` keys and as many values of `head_dim` numbers. `group_id`: its KV-cache group, and
    `sliding_window` the window in tokens for which that group keeps blocks (None: it keeps all of them)."""

    num_kv_heads: int
    head_dim: int
    group_id: int = 0
    sliding_window: int | None = None


@dataclass(frozen=True)
class StateShape:
    """What one Mamba layer keeps per request, however many tokens it has: the last `conv_width` inputs of its convolution in each of `conv_dim` channels, and
    an SSM state of `num_heads` matrices, [head_dim, state_size] each. `group_id`: its KV-cache group. vLLM: MambaStateShapeCalculator.mamba2_state_shape."""

    conv_dim: int
    conv_width: int
    num_heads: int
    head_dim: int
    state_size: int
    group_id: int = 0

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.conv_dim, self.conv_width

    @property
    def ssm_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size


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

    A Mamba layer's states lie in the same pages: of a block of its group `ssm_states[layer]` [num_blocks, num_heads, head_dim, state_size] is the beginning of
    the keys' part and `conv_states[layer]` [num_blocks, conv_dim, conv_width] that of the values' part. Its `key_caches` and `value_caches` are the whole
    pages, as the attention layers see them.

    Raises InvalidInput when a size is not positive, when the pages of two groups are not equally large, when a state does not fit into a page, when no layer
    has attention, or when the memory cannot be had. vLLM: KVCacheTensor.shared_by and page_size_padded; here: keys and values in memories of their own, and a
    block_size that is too small for a state is refused, where vLLM raises it by itself.
    """

    def __init__(
        self, *, num_blocks: int, block_sizes: Sequence[int], layers: Sequence[LayerShape | StateShape], dtype: torch.dtype, device: torch.device | str = "cpu"
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
        self.attention_layers = tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, LayerShape))
        """The layers that have keys and values, ascending."""
        if not self.attention_layers:
            raise InvalidInput("No layer of the model has attention, so there are no keys and values to keep in pages; choose a model with attention layers.")
        page_of = {self.storage_of[i]: i for i in reversed(self.attention_layers)}
        page_of |= {storage: self.attention_layers[0] for storage in self.storage_of if storage not in page_of}  # as large as any page of the pool
        shapes = [self._page_shape(i if i in self.attention_layers else page_of[storage]) for i, storage in enumerate(self.storage_of)]
        first_of = {storage: i for i, storage in reversed(list(enumerate(self.storage_of)))}
        first_of |= {self.storage_of[i]: i for i in reversed(self.attention_layers)}
        self.one_layer_of = sorted(first_of.values(), key=lambda layer: self.storage_of[layer])
        """Of each memory the first layer that lies in it, one with attention where there is one: what works on whole pages does it there, once, for all layers
        that share the memory."""
        for layer, storage in enumerate(self.storage_of):
            self._check_fit(layer, shapes[layer], first_of[storage], shapes[first_of[storage]])
        try:
            self.key_caches = _views(self.storage_of, shapes, dtype, device)
            self.value_caches = _views(self.storage_of, shapes, dtype, device)
        except RuntimeError as error:  # torch has no narrower type for the CPU allocator's failure
            size = sum(2 * prod(shapes[layer]) for layer in self.one_layer_of) * dtype.itemsize
            raise InvalidInput(
                f"{num_blocks} blocks of {', '.join(map(str, block_sizes))} tokens take {size / 2**20:.0f} MiB of keys and values, "
                "which this machine cannot give; ask for fewer blocks."
            ) from error
        states = [(i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, StateShape)]
        self.ssm_states = {i: _state_view(self.key_caches[i], layer.ssm_shape) for i, layer in states}
        self.conv_states = {i: _state_view(self.value_caches[i], layer.conv_shape) for i, layer in states}

    def attention_shape(self, layer: int) -> LayerShape:
        """The shape of a layer that has keys and values. Raises EngineError for one that keeps states."""
        shape = self.layers[layer]
        if not isinstance(shape, LayerShape):
            raise EngineError(f"Layer {layer} keeps a recurrent state, not keys and values; layers with attention are {_listed(self.attention_layers)}.")
        return shape

    def state_shape(self, layer: int) -> StateShape:
        """The shape of a layer that keeps states. Raises EngineError for one with keys and values."""
        shape = self.layers[layer]
        if not isinstance(shape, StateShape):
            raise EngineError(f"Layer {layer} stores keys and values, not a recurrent state.")
        return shape

    def _page_shape(self, layer: int) -> tuple[int, int, int, int]:
        shape = self.attention_shape(layer)
        return self.num_blocks, self.block_sizes[shape.group_id], shape.num_kv_heads, shape.head_dim

    def _check_fit(self, layer: int, page: tuple[int, ...], first: int, first_page: tuple[int, ...]) -> None:
        """Raises InvalidInput unless the layer can lie in the pages of the memory that layer `first` lies in."""
        if prod(page) != prod(first_page):
            raise InvalidInput(
                f"Layers {first} and {layer} are to share memory, but a block of one takes {prod(first_page[1:])} numbers and of the other "
                f"{prod(page[1:])}; give the groups block sizes that make them equal."
            )
        shape = self.layers[layer]
        if not isinstance(shape, StateShape):
            return
        _, block_size, num_kv_heads, head_dim = page
        ssm, conv = prod(shape.ssm_shape), prod(shape.conv_shape)
        if max(ssm, conv) > prod(page[1:]):
            smallest = -(-max(ssm, conv) // (num_kv_heads * head_dim))
            raise InvalidInput(
                f"A state of layer {layer} takes {ssm} numbers for its SSM state and {conv} for its convolution, but a block of {block_size} tokens has "
                f"room for {prod(page[1:])} of each; give a block_size of at least {smallest}."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages; memory that layers of several groups share counts once."""
        return sum(2 * self.key_caches[layer].numel() * self.key_caches[layer].element_size() for layer in self.one_layer_of)

    def copy_blocks(
        self, block_pairs: Sequence[tuple[int, int]], backend: Backend, layers: Sequence[int] | None = None, witness: Witness | None = None
    ) -> None:
        """Copy whole pages (source, destination) in `layers`, no two of which may share memory, None for all memory; all sources are read before any
        destination is written (R6.7): a second copy of the same memory could read what the first has written. `witness` is told of one launch per layer."""
        pairs = torch.tensor(list(block_pairs), dtype=torch.int64)  # on the host, where the kernels' launcher may look for hazards without waiting
        wanted = self.one_layer_of if layers is None else layers
        copy_blocks([self.key_caches[i] for i in wanted], [self.value_caches[i] for i in wanted], pairs, witness=witness, backend=backend)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrite the pages of `block_ids` with zeros in every layer."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.key_caches[0].device)
        for layer in self.one_layer_of:
            self.key_caches[layer].index_fill_(0, index, 0)
            self.value_caches[layer].index_fill_(0, index, 0)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _state_view(pages: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The beginning of each page, seen as a state."""
    return pages.flatten(1)[:, : prod(shape)].view(pages.shape[0], *shape)


def _storages(layers: Sequence[LayerShape | StateShape]) -> tuple[int, ...]:
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
