"""What stays behind the end of a row (R8.2, case A21): in the worker's tensors, and in the lists of a run without a model, which must say the same."""

from __future__ import annotations

import random

import pytest

from engine.errors import EngineError
from engine.plain_rows import PlainRows
from engine.trace.events import Event
from engine.worker.block_table import MultiGroupBlockTable
from engine.worker.input_batch import InputBatch


def make_table(clears_rows: bool, num_groups: int = 1) -> MultiGroupBlockTable:
    table = MultiGroupBlockTable(block_sizes=[4] * num_groups, max_num_reqs=8, max_model_len=512, max_num_batched_tokens=16)
    if not clears_rows:
        table.leave_rows_as_they_are()
    return table


def test_a21_a_moved_row_keeps_the_end_of_the_row_that_was_there() -> None:
    """A21 (R8.2): row 0 is A's [1..6], row 1 B's [7,8,9]. A leaves, B moves down, and behind its three entries A's last three still stand."""
    batch = InputBatch(make_table(clears_rows=False), None)
    batch.add_row("A", [[1, 2, 3, 4, 5, 6]])
    batch.add_row("B", [[7, 8, 9]])
    batch.remove_request("A")
    batch.condense()
    (row,) = batch.rows()
    assert (row.row, row.request_id, row.block_ids, row.stale_block_ids) == (0, "B", ((7, 8, 9),), ((4, 5, 6),))
    assert batch.block_table[0].block_table_np[0, :8].tolist() == [7, 8, 9, 4, 5, 6, 0, 0]
    batch.append_row("B", [[10]])
    assert batch.rows()[0].stale_block_ids == ((5, 6),)


def test_a21_a_cleared_row_keeps_nothing() -> None:
    """R8.2: V1's runner zeroes the used part of a row that is left, so the same moves leave zeros."""
    batch = InputBatch(make_table(clears_rows=True), None)
    batch.add_row("A", [[1, 2, 3, 4, 5, 6]])
    batch.add_row("B", [[7, 8, 9]])
    batch.remove_request("A")
    batch.condense()
    assert batch.rows()[0].stale_block_ids == ()
    assert batch.block_table[0].block_table_np[0, :8].tolist() == [7, 8, 9, 0, 0, 0, 0, 0]


def test_add_row_leaves_what_is_behind_the_new_length() -> None:
    """R8.2: add_row sets the length to 0 and appends, whoever the row belonged to; a zero in the middle of the rest is shown, zeros at its end are not."""
    table = make_table(clears_rows=True)[0]
    table.add_row([1, 2, 3, 4, 5], 0)
    table.add_row([9], 0)
    assert (table.row(0), table.stale_tail(0)) == ([9], [2, 3, 4, 5])
    table.clear_row(0)
    assert table.stale_tail(0) == [0, 2, 3, 4, 5]
    table.append_row([7, 7, 7, 7, 7], 0)
    assert table.stale_tail(0) == []
    table.swap_row(0, 1)
    assert (table.stale_tail(0), table.stale_tail(1), table.row(1)) == ([], [], [7, 7, 7, 7, 7])


@pytest.mark.parametrize("clears_rows", [True, False], ids=["cleared", "written over"])
def test_lists_and_tensors_say_the_same(clears_rows: bool) -> None:
    """Requests come, grow and go in any order: rows, ends and events of a run without a model are those of the worker."""
    draw = random.Random(5)
    tails = 0
    for _ in range(60):
        heard: tuple[list[Event], list[Event]] = ([], [])
        batch = InputBatch(make_table(clears_rows, 2), heard[0].append)
        plain = PlainRows(2, heard[1].append, clears_rows=clears_rows)
        names = iter(range(1000))
        for _ in range(12):
            for request_id in [r for r in batch.req_id_to_index if draw.random() < 0.3]:
                batch.remove_request(request_id)
                plain.remove(request_id)
            for _ in range(draw.randrange(3)):
                if batch.num_reqs < 8:
                    name, ids = f"r{next(names)}", _ids(draw)
                    batch.add_row(name, ids)
                    plain.add(name, ids)
            for request_id in list(batch.req_id_to_index):
                ids = _ids(draw, most=2)
                batch.append_row(request_id, ids)
                plain.append(request_id, ids)
            batch.condense()
            plain.condense()
            assert plain.rows() == batch.rows()
            assert heard[0] == heard[1]
            assert ("nobody" in plain) is False
            tails += sum(len(ids) for row in batch.rows() for ids in row.stale_block_ids)
    assert (tails > 0) is not clears_rows


def test_a_row_that_would_overflow_stays_as_it_is() -> None:
    table = make_table(clears_rows=False)[0]
    table.add_row([1, 2], 0)
    with pytest.raises(EngineError, match="columns"):
        table.append_row(list(range(200)), 0)
    assert (table.row(0), table.stale_tail(0)) == ([1, 2], [])


def _ids(draw: random.Random, most: int = 6) -> list[list[int]]:
    return [[draw.randrange(1, 90) for _ in range(draw.randrange(most + 1))] for _ in range(2)]
