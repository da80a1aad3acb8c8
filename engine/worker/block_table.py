"""The block tables as the worker keeps them: one int32 row per request of the batch, written on the host and committed to the device (R8.1-R8.5)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineError
from kernels import Backend, Witness, compute_slot_mapping

TOKEN_ALIGNMENT = 128


def table_width(max_num_blocks_per_req: int, block_size: int, *, holds_states: bool = False) -> int:
    """Columns of a table whose longest request has `max_num_blocks_per_req` blocks: rounded up so that the columns cover a multiple of
    128 tokens, except where the blocks hold recurrent states (R8.1). vLLM: MultiGroupBlockTable.__init__."""
    if holds_states:
        return max_num_blocks_per_req
    columns = TOKEN_ALIGNMENT // math.gcd(TOKEN_ALIGNMENT, block_size)
    return -(-max_num_blocks_per_req // columns) * columns


class BlockTable:
    """One KV-cache group's table.

    `block_table_np`: int32 [max_num_reqs, width], the host's view, which every row operation writes; `block_table`: the device copy that kernels read,
    valid for the rows of the last `commit_block_table`. `num_blocks_per_row`: int32 [max_num_reqs]. `slot_mapping`: int64 [max_num_batched_tokens],
    indexed by the token's place in the batch (R8.5). With `kernel_block_size` below `block_size` every block id is stored as
    block_size / kernel_block_size smaller ids, and lengths count those (R8.4). `clears_rows`: whether a row that is left becomes zero (R8.2). If not, it keeps
    its ids until others are written over them, as in the tables of vLLM's V2 model runner.

    vLLM: BlockTable; here: no context parallelism.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str = "cpu",
        kernel_block_size: int | None = None,
        holds_states: bool = False,
    ) -> None:
        self.block_size = block_size
        self.holds_states = holds_states
        self.kernel_block_size = block_size if kernel_block_size is None else kernel_block_size
        if self.kernel_block_size < 1 or block_size % self.kernel_block_size:
            raise EngineError(
                f"The kernel's block size {self.kernel_block_size} does not divide the KV cache's block size {block_size}; choose a divisor of {block_size}."
            )
        self.blocks_per_kv_block = block_size // self.kernel_block_size
        self.width = table_width(-(-max_model_len // block_size), block_size, holds_states=holds_states) * self.blocks_per_kv_block
        self._host = torch.zeros((max_num_reqs, self.width), dtype=torch.int32)
        self.block_table_np: npt.NDArray[np.int32] = self._host.numpy()
        self.block_table = torch.zeros((max_num_reqs, self.width), dtype=torch.int32, device=device)
        self.num_blocks_per_row: npt.NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        self.clears_rows = True
        self._written: npt.NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        """Per row the columns that may be other than zero."""
        self.slot_mapping = torch.full((max_num_batched_tokens,), -1, dtype=torch.int64, device=device)

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Set the row's length to 0, then append: data beyond the new length stays as it was (R8.2)."""
        self.num_blocks_per_row[row] = 0
        self.append_row(block_ids, row)

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Write `block_ids` behind the row's current length (R8.2). Raises EngineError, and changes nothing, when the row would overflow."""
        if not block_ids:
            return
        ids = np.asarray(block_ids, dtype=np.int32)
        if self.blocks_per_kv_block > 1:
            parts = np.arange(self.blocks_per_kv_block, dtype=np.int32)
            ids = (ids[:, None] * np.int32(self.blocks_per_kv_block) + parts).reshape(-1)
        start = int(self.num_blocks_per_row[row])
        end = start + len(ids)
        if end > self.width:
            raise EngineError(
                f"Row {row} of the block table has {self.width} columns but {end} blocks are to be written; raise max_model_len or shorten the request."
            )
        self.block_table_np[row, start:end] = ids
        self.num_blocks_per_row[row] = end
        self._written[row] = max(end, int(self._written[row]))

    def replace_row(self, block_ids: Sequence[int], row: int, start: int) -> None:
        """Write `block_ids` from column `start` on, whatever stood there, and end the row behind them. `start` counts blocks of `block_size` and is at most
        the row's length. vLLM's first release built its tables anew every iteration; V1 never replaces an entry."""
        self.num_blocks_per_row[row] = start * self.blocks_per_kv_block
        self.append_row(block_ids, row)

    def clear_row(self, row: int) -> None:
        """Zero the used part of the row and set its length to 0 (R8.2); without `clears_rows` only the latter."""
        if self.clears_rows:
            self.block_table_np[row, : self.num_blocks_per_row[row]] = 0
        self.num_blocks_per_row[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy the used part of `source` over `target`, then clear `source` (R8.2). Nothing happens when they are the same row."""
        if source == target:
            return
        length = int(self.num_blocks_per_row[source])
        self.block_table_np[target, :length] = self.block_table_np[source, :length]
        self.num_blocks_per_row[target] = length
        self._written[target] = max(length, int(self._written[target]))
        self.clear_row(source)

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two whole rows and their lengths (R8.2)."""
        rows = [first, second]
        self.block_table_np[rows] = self.block_table_np[[second, first]]
        self.num_blocks_per_row[rows] = self.num_blocks_per_row[[second, first]]
        self._written[rows] = self._written[[second, first]]

    def row(self, row: int) -> list[int]:
        """The used part of the host's row, as kernels will see it after the next commit."""
        used: list[int] = self.block_table_np[row, : self.num_blocks_per_row[row]].tolist()
        return used

    def stale_tail(self, row: int) -> list[int]:
        """What stands in the row behind its length, left by whoever was there before, up to the last entry that is not zero. Usually nothing."""
        start, end = int(self.num_blocks_per_row[row]), int(self._written[row])
        if end <= start:
            return []
        tail: list[int] = self.block_table_np[row, start:end].tolist()
        while tail and not tail[-1]:
            tail.pop()
        return tail

    def commit_block_table(self, num_reqs: int) -> None:
        """Copy the first `num_reqs` rows to the device; the device's other rows stay as they were (R8.2)."""
        self.block_table[:num_reqs].copy_(self._host[:num_reqs], non_blocking=True)

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor, backend: Backend, witness: Witness | None = None
    ) -> None:
        """Fill `slot_mapping` from the committed rows and -1 behind the batch (R8.4, R8.5). `query_start_loc`: int32 [num_reqs + 1];
        `positions`: int64 [num_tokens], each token's position in its own request. `witness` is told what a kernel's programs do."""
        compute_slot_mapping(
            query_start_loc,
            positions,
            self.block_table[:num_reqs],
            self.slot_mapping,
            block_size=self.kernel_block_size,
            witness=witness,
            backend=backend,
        )


class MultiGroupBlockTable:
    """One BlockTable per KV-cache group, written together; `state_groups`: those whose blocks hold recurrent states. Block ids travel as one list per group.
    vLLM: MultiGroupBlockTable."""

    def __init__(
        self,
        *,
        block_sizes: Sequence[int],
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str = "cpu",
        state_groups: Collection[int] = (),
    ) -> None:
        self.block_tables = [
            BlockTable(
                block_size=block_size,
                max_num_reqs=max_num_reqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                device=device,
                holds_states=group_id in state_groups,
            )
            for group_id, block_size in enumerate(block_sizes)
        ]

    def __getitem__(self, group_id: int) -> BlockTable:
        return self.block_tables[group_id]

    def __len__(self) -> int:
        return len(self.block_tables)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """BlockTable.add_row in every group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.add_row(ids, row)

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        """BlockTable.append_row in every group."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table.append_row(ids, row)

    def clear_row(self, row: int) -> None:
        """BlockTable.clear_row in every group."""
        for table in self.block_tables:
            table.clear_row(row)

    def move_row(self, source: int, target: int) -> None:
        """BlockTable.move_row in every group."""
        for table in self.block_tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        """BlockTable.swap_row in every group."""
        for table in self.block_tables:
            table.swap_row(first, second)

    def row(self, row: int) -> tuple[tuple[int, ...], ...]:
        """The used part of the row, per group."""
        return tuple(tuple(table.row(row)) for table in self.block_tables)

    def stale_tails(self, row: int) -> tuple[tuple[int, ...], ...]:
        """BlockTable.stale_tail of every group, nothing at all where no group has one."""
        tails = tuple(tuple(table.stale_tail(row)) for table in self.block_tables)
        return tails if any(tails) else ()

    def leave_rows_as_they_are(self) -> None:
        """From now on no group clears a row (`clears_rows`)."""
        for table in self.block_tables:
            table.clears_rows = False

    def commit_block_table(self, num_reqs: int) -> None:
        """BlockTable.commit_block_table in every group."""
        for table in self.block_tables:
            table.commit_block_table(num_reqs)

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor, backend: Backend) -> None:
        """BlockTable.compute_slot_mapping in every group with slots; groups of states are left untouched (R8.5)."""
        for table in self.block_tables:
            if table.holds_states:
                continue
            table.compute_slot_mapping(num_reqs, query_start_loc, positions, backend)
