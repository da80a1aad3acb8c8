"""Which memory an interpreted launch touches: every masked load and store of the interpreter passes by here while somebody watches.

The interpreter holds a tile of addresses as one array, and the kernels' leading axis is their lanes, so each address belongs to a lane of a program.
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
_FAR = np.iinfo(np.int64).max


class Touched(NamedTuple):
    """Elements of a watched tensor that one tile touched: per element its program, its lane and its index in each watched dimension."""

    program: int
    lanes: Ids
    indices: tuple[Ids, ...]


class WatchedTensor:
    """A tensor by its memory. `dimensions`: those whose indices are wanted, of which the first `exact` tell one element from another; of the others
    the first and last index of a run are enough."""

    def __init__(self, tensor: torch.Tensor, dimensions: Sequence[int], exact: int) -> None:
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

    def note(self, kind: Literal["reads", "writes"], program: int, addresses: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> None:
        """Remember what a tile touches of this tensor. `addresses`, `mask`: the same shape, lanes on the leading axis."""
        places = addresses.astype(np.int64) - self.start
        inside = mask & (places >= 0) & (places < self.end - self.start)
        if not inside.any():
            return
        places //= self.itemsize
        low = np.where(inside, places, _FAR).min(axis=-1)
        high = np.where(inside, places, -1).max(axis=-1)
        touched = high >= 0
        if places.ndim > 1 and bool((low[touched] // self.run == high[touched] // self.run).all()):
            lanes = np.nonzero(touched)[0]
            found = [self._touched(program, lanes, low[touched]), self._touched(program, lanes, high[touched])]
        else:
            found = [self._touched(program, np.nonzero(inside)[0], places[inside])]
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
def watching(tensors: Sequence[WatchedTensor]) -> Iterator[None]:
    """While this lasts, interpreted launches of this thread note in `tensors` what they touch of them; other threads' launches wait."""
    builder = triton_interpreter.interpreter_builder
    load, store = type(builder).create_masked_load.__get__(builder), type(builder).create_masked_store.__get__(builder)

    def note(kind: Literal["reads", "writes"], pointers: Any, mask: Any) -> None:
        addresses, masked = np.atleast_1d(pointers.data), np.atleast_1d(mask.data)
        seen = addresses if masked.all() else addresses[masked]
        if not seen.size:
            return
        first, last = int(seen.min()), int(seen.max())
        x, y, z = builder.grid_idx
        _, wide, deep = builder.grid_dim
        for tensor in tensors:
            if first < tensor.end and last >= tensor.start:
                tensor.note(kind, (x * wide + y) * deep + z, addresses, masked)

    def masked_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        note("reads", pointers, mask)
        return load(pointers, mask, *rest, **named)

    def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        note("writes", pointers, mask)
        return store(pointers, value, mask, *rest, **named)

    with LOCK:
        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        try:
            yield
        finally:
            del builder.create_masked_load, builder.create_masked_store
