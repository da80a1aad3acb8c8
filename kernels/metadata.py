"""What the batch of one step looks like to the kernels: made once per step and KV-cache group, read by every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Derived:
    """What a backend works out from the tensors of a batch (gather indices, masks, query blocks), each under a key of its own."""

    max_seq_len: int | None = None
    """Upper bound of seq_lens that the host knows; None: as many as a row of the block table has room for."""

    def __init__(self) -> None:
        self._values: dict[Hashable, object] = {}

    def once(self, key: Hashable, derive: Callable[[], T]) -> T:
        """The value of `derive()`, called only when `key` is asked for the first time."""
        if key not in self._values:
            self._values[key] = derive()
        return cast("T", self._values[key])


class AttentionMetadata(Derived):
    """The tensors that `reshape_and_cache` and `paged_attention` take besides a layer's own, checked once instead of in every layer.

    block_table: int32 [>= num_reqs, width]; query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs]; slot_mapping: int64 [num_slots].
    max_seq_len: upper bound of seq_lens, by which compiled attention chooses its programs without waiting for a GPU; None: the width of the block table.
    While the object is in use the tensors must keep their contents, because what a backend derives from them it derives once.
    Raises ValueError for shapes or dtypes that do not fit together.
    vLLM: AttentionMetadata and its builder; here: one class for all backends, and nothing is derived before it is needed.
    """

    def __init__(self, *, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slot_mapping: Tensor, max_seq_len: int | None = None) -> None:
        super().__init__()
        check_batch(block_table, query_start_loc, seq_lens)
        check_slot_mapping(slot_mapping)
        self.block_table = block_table
        self.query_start_loc = query_start_loc
        self.seq_lens = seq_lens
        self.slot_mapping = slot_mapping
        self.max_seq_len = max_seq_len
        self.checked_caches: tuple[Tensor, Tensor] | None = None  # the two caches that were found to be in order last

    def expect(self, **tensors: Tensor) -> None:
        """Raise ValueError unless each tensor is the very one that this object was made from."""
        for name, tensor in tensors.items():
            if getattr(self, name) is not tensor:
                raise ValueError(f"{name} is not the tensor that the metadata was made from; make new metadata for every step.")


def check_batch(block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError for shapes or dtypes that do not fit together."""
    import torch

    expect("block_table", block_table, torch.int32, 2)
    expect("query_start_loc", query_start_loc, torch.int32, 1)
    expect("seq_lens", seq_lens, torch.int32, 1)
    num_reqs = seq_lens.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"seq_lens names {num_reqs} requests, but query_start_loc has {query_start_loc.shape[0]} entries and block_table"
            f" {block_table.shape[0]} rows; {num_reqs + 1} entries and at least {num_reqs} rows are needed."
        )


def check_slot_mapping(slot_mapping: Tensor) -> None:
    """Raise ValueError for another dtype or shape than int64 [num_slots]."""
    import torch

    expect("slot_mapping", slot_mapping, torch.int64, 1)


def expect(name: str, tensor: Tensor, dtype: object, dimensions: int) -> None:
    """Raise ValueError, naming the argument, for another dtype or number of dimensions."""
    if tensor.dtype != dtype or tensor.dim() != dimensions:
        raise ValueError(f"{name} is {tensor.dtype} with {tensor.dim()} dimensions; it must be {dtype} with {dimensions}.")
