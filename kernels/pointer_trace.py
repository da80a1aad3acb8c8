"""Which memory an interpreted launch touches: every masked load and store of the interpreter passes by here while somebody watches.

The interpreter holds a tile of addresses as one array, and the kernels' leading axis is their lanes (a program with one lane has no axis for it), so each
address belongs to a lane of a program.
Only addresses whose mask is true count: the others are never followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime import interpreter as triton_interpreter

from kernels.interpreter import LOCK

Ids = npt.NDArray[np.int64]
_FAR = np.uint64(np.iinfo(np.int64).max)


class Touched(NamedTuple):
    """Elements of a watched tensor that one tile touched: per element its program, its lane, its index in each watched dimension and what was stored there
    (None unless the tensor keeps values)."""

    program: int
    lanes: Ids
    indices: tuple[Ids, ...]
    values: Ids | None = None


class Tile:
    """The addresses of one load or store, `mask` tells which are followed. Lanes are on the leading axis; a row is what lies along the last one. `any`: rows
    of which something is followed; `low`, `high`: the first and last address of each that is."""

    def __init__(self, addresses: npt.NDArray[np.uint64], mask: npt.NDArray[np.bool_]) -> None:
        whole = addresses.ndim > 1
        self.addresses, self.mask = (addresses, mask) if whole else (addresses.reshape(-1, 1), mask.reshape(-1, 1))
        self.any = self.mask.any(axis=-1)
        if np.array_equal(self.any, self.mask.all(axis=-1)):  # as good as always, and three times faster
            self.low, self.high = self.addresses.min(axis=-1), self.addresses.max(axis=-1)
        else:
            self.low = np.where(self.mask, self.addresses, _FAR).min(axis=-1)
            self.high = np.where(self.mask, self.addresses, np.uint64(0)).max(axis=-1)


class WatchedTensor:
    """A tensor by its memory. `dimensions`: those whose indices are wanted, of which the first `exact` tell one element from another; of the others
    the first and last index of a run are enough. `keeps_values`: for a dense tensor of integers, also what is stored."""

    def __init__(self, tensor: torch.Tensor, dimensions: Sequence[int], exact: int, *, keeps_values: bool = False) -> None:
        self.keeps_values = keeps_values
        self.start = tensor.data_ptr()
        self.itemsize = tensor.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.end = self.start + extent * self.itemsize
        self.dimensions = tuple(dimensions)
        # From the widest stride down, an index is what the wider ones leave over; a dimension of size 1 has index 0, whatever its stride.
        sized = [(tensor.stride(d), d) for d in range(tensor.dim()) if tensor.shape[d] > 1]
        self._strides = [(stride, d, tensor.shape[d]) for stride, d in sorted(sized, reverse=True)]
        exact_strides = [stride for stride, d in sized if d in self.dimensions[:exact]]
        self.run = min(exact_strides, default=extent)
        """Elements that lie one behind the other and have the same exact indices."""
        self.reads: list[Touched] = []
        self.writes: list[Touched] = []

    def note(self, kind: Literal["reads", "writes"], program: int, tile: Tile, stored: npt.NDArray[Any] | None = None) -> None:
        """Remember what a tile touches of this tensor. `stored`: what a store stores, as large as the tile."""
        overlapping = tile.any & (tile.low < self.end) & (tile.high >= self.start)
        if not overlapping.any():
            return
        if self.keeps_values and stored is not None:
            chosen = tile.mask & (tile.addresses >= self.start) & (tile.addresses < self.end)
            touched = self._touched(program, np.nonzero(chosen)[0], (tile.addresses[chosen].astype(np.int64) - self.start) // self.itemsize)
            self.writes.append(touched._replace(values=stored.reshape(chosen.shape)[chosen].astype(np.int64)))
            return
        low, high = ((row[overlapping].astype(np.int64) - self.start) // self.itemsize for row in (tile.low, tile.high))
        inside = low.min() >= 0 and high.max() < (self.end - self.start) // self.itemsize
        if inside and bool((low // self.run == high // self.run).all()):
            lanes = np.nonzero(overlapping)[0]
            found = [self._touched(program, lanes, low)]
            if not np.array_equal(low, high):
                found.append(self._touched(program, lanes, high))
        else:
            chosen = tile.mask & (tile.addresses >= self.start) & (tile.addresses < self.end)
            found = [self._touched(program, np.nonzero(chosen)[0], (tile.addresses[chosen].astype(np.int64) - self.start) // self.itemsize)]
        (self.reads if kind == "reads" else self.writes).extend(found)

    def _touched(self, program: int, lanes: Ids, places: Ids) -> Touched:
        """Without what lies between the tensor's elements: another tensor, when the two share their memory in turns."""
        index: dict[int, Ids] = {}
        ours = np.ones(places.shape, dtype=bool)
        for stride, dimension, size in self._strides:
            index[dimension], places = np.divmod(places, stride)
            ours &= index[dimension] < size
        found = [index.get(dimension, np.zeros_like(places)) for dimension in self.dimensions]
        if ours.all():
            return Touched(program, lanes, tuple(found))
        return Touched(program, lanes[ours], tuple(values[ours] for values in found))


@contextmanager
def watching(tensors: Sequence[WatchedTensor], has_lanes: bool = True) -> Iterator[None]:
    """While this lasts, interpreted launches of this thread note in `tensors` what they touch of them; other threads' launches wait. Unless `has_lanes`, all
    that a program touches belongs to its lane 0."""
    builder = triton_interpreter.interpreter_builder
    load, store = type(builder).create_masked_load.__get__(builder), type(builder).create_masked_store.__get__(builder)

    def note(kind: Literal["reads", "writes"], pointers: Any, mask: Any, stored: Any = None) -> None:
        tile = Tile(pointers.data, mask.data) if has_lanes else Tile(pointers.data[None], mask.data[None])
        x, y, z = builder.grid_idx
        _, wide, deep = builder.grid_dim
        for tensor in tensors:
            tensor.note(kind, (x * wide + y) * deep + z, tile, stored)

    def masked_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        note("reads", pointers, mask)
        return load(pointers, mask, *rest, **named)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        note("writes", pointers, mask, value.data)
        return store(pointers, value, mask, *rest, **named)

    with LOCK:
        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        try:
            yield
        finally:
            del builder.create_masked_load, builder.create_masked_store
