"""Request-level batching beside Orca's iteration-level scheduling, counted by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.paper.batching import BatchSchedule, Policy, Segment, schedule_batches
from engine.paper.workload import Workload, WorkloadRequest


def workload(*requests: tuple[float, int]) -> Workload:
    """(arrival, outputs) each."""
    return Workload("W", "test", tuple(WorkloadRequest(arrival, 4, outputs, "ABCDEFGHIJKL"[i]) for i, (arrival, outputs) in enumerate(requests)))


FOUR = workload((0, 2), (0, 5), (1, 3), (2, 1))


def lives(schedule: BatchSchedule) -> list[tuple[str, int, int, int, int]]:
    return [(row.request_id, row.start, row.end, row.returned, row.place) for row in schedule.rows]


def test_request_level() -> None:
    """Two places. A and B run 5 iterations, though A is done after 2; C and D, which came meanwhile, wait till 5 and run 3."""
    schedule = schedule_batches(FOUR, "request", 2)
    assert lives(schedule) == [("A", 0, 2, 5, 0), ("B", 0, 5, 5, 1), ("C", 5, 8, 8, 0), ("D", 5, 6, 8, 1)]
    assert schedule.rows[0].segments == (Segment(0, 1, "prompt"), Segment(1, 2, "decode"), Segment(2, 5, "padding"))
    assert schedule.rows[2].segments == (Segment(1, 5, "waits"), Segment(5, 6, "prompt"), Segment(6, 8, "decode"))
    assert (schedule.num_iterations, schedule.end, schedule.num_padding) == (8, 8, 3 + 2)
    assert schedule.mean_latency == (5 + 5 + 7 + 6) / 4
    assert schedule.utilisation == (2 + 5 + 3 + 1) / 16


def test_iteration_level() -> None:
    """A leaves after 2, C takes its place at once; D gets the first place that becomes free, both at 5."""
    schedule = schedule_batches(FOUR, "iteration", 2)
    assert lives(schedule) == [("A", 0, 2, 2, 0), ("B", 0, 5, 5, 1), ("C", 2, 5, 5, 0), ("D", 5, 6, 6, 0)]
    assert schedule.rows[2].segments == (Segment(1, 2, "waits"), Segment(2, 3, "prompt"), Segment(3, 5, "decode"))
    assert (schedule.num_iterations, schedule.num_padding) == (6, 0)
    assert schedule.mean_latency == (2 + 5 + 4 + 4) / 4
    assert schedule.utilisation == 11 / 12


def test_idle_iterations_are_not_counted() -> None:
    for policy in ("request", "iteration"):
        schedule = schedule_batches(workload((0, 2), (9.5, 3)), policy, 4)
        assert (schedule.num_iterations, schedule.end, schedule.rows[1].start) == (5, 13, 10)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["request", "iteration"]),
)
def test_places_are_never_taken_twice(requests: list[tuple[float, int]], places: int, policy: Policy) -> None:
    """Whoever is in the batch has a place of its own, first come is first served, and nobody waits while a place is free (iteration level)."""
    schedule = schedule_batches(workload(*requests), policy, places)
    rows = schedule.rows
    assert [row.start for row in rows] == sorted(row.start for row in rows)
    busy = 0
    for now in range(schedule.end):
        inside = [row for row in rows if row.start <= now < row.returned]
        assert len({row.place for row in inside}) == len(inside) <= places
        waiting = any(row.arrival <= now < row.start for row in rows)
        assert not (waiting and not inside)
        if policy == "iteration":
            assert not (waiting and len(inside) < places)
        busy += bool(inside)
    assert busy == schedule.num_iterations
    for row in rows:
        assert [row.arrival if not row.segments else row.segments[0].start, row.segments[-1].end] == [row.arrival, row.returned]
        assert all(a.end == b.start for a, b in pairwise(row.segments))


@pytest.mark.parametrize(
    ("given_workload", "policy", "size", "message"),
    [
        (FOUR, "request", 0, "max_batch_size is 0"),
        (FOUR, "step", 2, "the policy 'step' is unknown"),
        (Workload("W", "", ()), "request", 2, "W must have requests"),
        (workload((0, 0)), "request", 2, "lengths start at 1"),
    ],
)
def test_bad_input(given_workload: Workload, policy: Policy, size: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        schedule_batches(given_workload, policy, size)
