"""A worker without a model: rows, slots, states and copies of any number of groups, on plans made by hand. Loads no torch."""

from __future__ import annotations

import pytest

from engine.bookkeeping import BookkeepingRunner, ContextParallelism, slot_of
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.core.output import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from engine.trace.events import BlocksCopied, Event, KVWritten, RowUpdated, SlotsMapped, StateWritten


def plan(
    new: dict[str, tuple[int, tuple[list[int], ...]]] | None = None,
    cached: dict[str, tuple[int, tuple[list[int], ...] | None]] | None = None,
    scheduled: dict[str, int] | None = None,
    copies: list[tuple[int, int]] | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    """New requests have a prompt of 13 tokens: computed so far and full tables; cached ones: computed so far and appended ids."""
    params = SamplingParams(max_tokens=20, forced_token_ids=tuple(range(100, 120)))
    cached, scheduled = cached or {}, scheduled or {}
    return SchedulerOutput(
        scheduled_new_reqs=[NewRequestData(r, list(range(13)), tables, computed, params) for r, (computed, tables) in (new or {}).items()],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached),
            new_block_ids=[tables for _, tables in cached.values()],
            num_computed_tokens=[computed for computed, _ in cached.values()],
            num_output_tokens=[0 for _ in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_common_prefix_blocks=[0],
        finished_req_ids=finished or set(),
        preempted_req_ids=set(),
        kv_cache_block_copies=copies or [],
    )


def runner(*specs: KVCacheSpec, parallelism: ContextParallelism | None = None) -> tuple[BookkeepingRunner, list[Event]]:
    events: list[Event] = []
    return BookkeepingRunner(specs, events.append, parallelism), events


@pytest.mark.parametrize(
    ("ranks", "interleave", "rank", "slots"),
    [
        (1, 1, 0, [28, 29, 30, 31, 4, 5, 6, 7]),
        (2, 1, 0, [28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5, -1]),
        (2, 1, 1, [-1, 28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5]),
        (2, 2, 0, [28, 29, -1, -1, 30, 31, -1, -1, 4, 5, -1, -1]),
    ],
)
def test_slots_of_each_rank(ranks: int, interleave: int, rank: int, slots: list[int]) -> None:
    """R8.4: the values that vLLM's own kernel gave for blocks of 4 and the row 7, 1."""
    parallelism = ContextParallelism(ranks, rank, interleave)
    assert [slot_of(position, [7, 1], 4, parallelism, rank) for position in range(len(slots))] == slots


def test_each_group_has_its_own_rows_and_slots() -> None:
    """R8.1, R8.4: groups of 8 and of 4 tokens per block; slot = row[p // bs] * bs + p % bs in each."""
    made, events = runner(FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=8))
    made.execute_model(plan(new={"A": (0, ([1, 2], [3, 4, 5, 6]))}, scheduled={"A": 13}))
    assert [(e.group_id, e.block_ids) for e in events if isinstance(e, RowUpdated)] == [(0, [1, 2]), (1, [3, 4, 5, 6])]
    mapped = [(e.group_id, e.slots) for e in events if isinstance(e, SlotsMapped)]
    assert mapped == [(0, [*range(8, 16), *range(16, 21)]), (1, list(range(12, 25)))]
    assert [(e.group_id, e.slots) for e in events if isinstance(e, KVWritten)] == mapped
    assert made.slot_mapping == tuple(mapped[0][1])
    made.execute_model(plan(cached={"A": (13, ([], [7]))}, scheduled={"A": 1}))
    assert [(e.group_id, e.start, e.block_ids) for e in events if isinstance(e, RowUpdated)][2:] == [(1, 4, [7])]
    assert made.rows()[0].block_ids == ((1, 2), (3, 4, 5, 6, 7))


def test_a_row_keeps_what_the_manager_has_let_go() -> None:
    """R8.3: when a window moves on nothing is sent, so the row still names blocks that the manager's table does not."""
    made, events = runner(SlidingWindowSpec(4, sliding_window=4))
    made.execute_model(plan(new={"A": (0, ([1, 2, 3, 4],))}, scheduled={"A": 13}))
    made.execute_model(plan(cached={"A": (13, None)}, scheduled={"A": 1}))
    assert made.rows()[0].block_ids == ((1, 2, 3, 4),)
    assert [e.slots for e in events if isinstance(e, KVWritten)][-1] == [17]
    assert {e.group_id for e in events if isinstance(e, SlotsMapped | KVWritten)} == {None}


@pytest.mark.parametrize(
    ("mode", "row", "start", "end", "states"),
    [
        ("none", [5], 0, 13, [(5, 13)]),
        ("align", [0, 1], 0, 8, [(1, 8)]),
        ("align", [0, 1, 2], 8, 10, [(2, 10)]),
        ("all", [1, 2, 3, 4], 0, 13, [(1, 4), (2, 8), (3, 12), (4, 13)]),
        ("all", [0, 0, 3, 4], 12, 13, [(4, 13)]),
        ("all", [1, 2, 3, 4], 6, 8, [(2, 8)]),
    ],
)
def test_states_instead_of_slots(mode: str, row: list[int], start: int, end: int, states: list[tuple[int, int]]) -> None:
    """R3.42, R3.43, R8.5: recurrent groups have no slots; a step leaves one state behind, in mode all one at the end of each block as well."""
    made, events = runner(MambaSpec(4, mamba_cache_mode=mode))
    made.execute_model(plan(new={"A": (start, (row,))}, scheduled={"A": end - start}))
    assert [(e.block_id, e.num_tokens) for e in events if isinstance(e, StateWritten)] == states
    assert not [e for e in events if isinstance(e, SlotsMapped | KVWritten)]
    assert made.slot_mapping == ()


@pytest.mark.parametrize(
    ("mode", "row", "start", "end", "sources"),
    [
        ("none", [5], 0, 13, [(None, 0)]),
        ("none", [5], 13, 14, [(5, 13)]),
        ("align", [0, 1, 2], 8, 10, [(1, 8)]),
        ("align", [0, 1, 2], 10, 11, [(2, 10)]),
        ("all", [1, 2, 3, 4], 0, 13, [(None, 0), (1, 4), (2, 8), (3, 12)]),
        ("all", [0, 0, 3, 4], 12, 13, [(3, 12)]),
    ],
)
def test_a_state_says_what_it_grew_out_of(mode: str, row: list[int], start: int, end: int, sources: list[tuple[int | None, int]]) -> None:
    """Read from column (computed - 1) // block_size, as vLLM's preprocess_mamba does; on the way of a step each state grows out of the one before. No layer
    computes anything."""
    made, events = runner(MambaSpec(4, mamba_cache_mode=mode))
    made.execute_model(plan(new={"A": (start, (row,))}, scheduled={"A": end - start}))
    written = [e for e in events if isinstance(e, StateWritten)]
    assert [(e.source_block_id, e.num_source_tokens) for e in written] == sources
    assert {(e.num_layers, e.backend) for e in written} == {(0, "none")}


def test_the_state_of_the_last_token_and_not_of_a_draft() -> None:
    """R3.43: behind the running state lie the blocks for draft tokens."""
    made, events = runner(MambaSpec(4, mamba_cache_mode="align", num_speculative_blocks=1))
    made.execute_model(plan(new={"A": (0, ([1, 2],))}, scheduled={"A": 4}))
    made.execute_model(plan(cached={"A": (4, ([3],))}, scheduled={"A": 4}))
    assert [(e.block_id, e.num_tokens) for e in events if isinstance(e, StateWritten)] == [(1, 4), (2, 8)]


def test_copies_come_before_writes() -> None:
    """R8.6, R6.6: copied blocks are whole before anything is written into them."""
    made, events = runner(FullAttentionSpec(8), MambaSpec(8, mamba_cache_mode="align"))
    made.execute_model(plan(new={"B": (12, ([1, 4], [0, 5]))}, scheduled={"B": 1}, copies=[(2, 4), (3, 5)]))
    kinds = [type(e) for e in events]
    assert kinds.index(RowUpdated) < kinds.index(BlocksCopied) < kinds.index(SlotsMapped) < kinds.index(KVWritten) < kinds.index(StateWritten)
    copied = events[kinds.index(BlocksCopied)]
    assert isinstance(copied, BlocksCopied)
    assert (copied.source_block_ids, copied.destination_block_ids) == ([2, 3], [4, 5])


def test_only_the_shown_rank_writes() -> None:
    """R8.4: both ranks are mapped, slot -1 for foreign tokens; the frames show the memory of one."""
    made, events = runner(FullAttentionSpec(4), parallelism=ContextParallelism(2, 1, 1))
    made.execute_model(plan(new={"A": (8, ([7, 1],))}, scheduled={"A": 3}))
    assert [(e.cause.facts["dcp_rank"], e.slots) for e in events if isinstance(e, SlotsMapped)] == [(0, [4, -1, 5]), (1, [-1, 4, -1])]
    assert [(e.slots, e.token_ids) for e in events if isinstance(e, KVWritten)] == [([4], [9])]
    assert made.slot_mapping == (-1, 4, -1)


def test_a_finished_request_leaves_every_group() -> None:
    made, events = runner(FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8))
    made.execute_model(plan(new={"A": (0, ([1, 2, 3, 4], [5, 6, 7, 8]))}, scheduled={"A": 13}))
    made.execute_model(plan(finished={"A"}))
    assert [(e.group_id, e.block_ids) for e in events if isinstance(e, RowUpdated)][2:] == [(0, []), (1, [])]
    assert made.rows() == ()
