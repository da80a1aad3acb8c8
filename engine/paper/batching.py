"""Two ways to batch the same requests: whole requests at a time, or iteration by iteration as Orca does (section 2.2). Who computes, and who waits, when."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from engine.errors import InvalidInput
from engine.paper.workload import Workload, WorkloadRequest

Policy = Literal["request", "iteration"]
POLICY_NAMES: dict[Policy, str] = {"request": "Request-level batching", "iteration": "Iteration-level scheduling"}
Activity = Literal["waits", "prompt", "decode", "padding"]
ACTIVITY_NAMES: dict[Activity, str] = {
    "waits": "waits",
    "prompt": "computes its prompt",
    "decode": "generates",
    "padding": "finished, but its place stays taken",
}


@dataclass(frozen=True)
class Segment:
    """Iterations start .. end-1, in which a request does the same."""

    start: int
    end: int
    activity: Activity


@dataclass(frozen=True)
class BatchRow:
    """A request's life. `arrival`, `start` (first iteration that computes it), `end` (first one that does not), `returned` (when its answer goes back to
    whoever asked: with request-level batching not before the whole batch is done), all in iterations. `latency` = returned - arrival. `place`: row of the
    batch."""

    request_id: str
    arrival: int
    start: int
    end: int
    returned: int
    place: int
    segments: tuple[Segment, ...]

    @property
    def latency(self) -> int:
        return self.returned - self.arrival


@dataclass(frozen=True)
class BatchSchedule:
    """What came of one policy. `rows` in order of arrival. `num_iterations`: those in which something ran; `end`: the first one after the last. `utilisation`:
    share of the batch's places, over the iterations that ran, that computed a token."""

    policy: Policy
    rows: tuple[BatchRow, ...]
    max_batch_size: int
    num_iterations: int
    end: int

    @property
    def name(self) -> str:
        return POLICY_NAMES[self.policy]

    @property
    def mean_latency(self) -> float:
        return fmean(row.latency for row in self.rows)

    @property
    def utilisation(self) -> float:
        return sum(row.end - row.start for row in self.rows) / (self.max_batch_size * self.num_iterations)

    @property
    def num_padding(self) -> int:
        """Place-iterations that were spent on requests that had finished."""
        return sum(s.end - s.start for row in self.rows for s in row.segments if s.activity == "padding")


def schedule_batches(workload: Workload, policy: Policy, max_batch_size: int) -> BatchSchedule:
    """Serve the workload (arrivals in iterations) with at most `max_batch_size` requests at a time; memory plays no part here.

    Both policies take requests first come, first served, and compute a prompt in one iteration that also gives the first output token. ``request``: when
    nothing runs, all waiting requests that fit become a batch, which runs until its longest output is done; nobody joins, and places of shorter requests are
    padded.
    ``iteration``: before every iteration finished requests leave and waiting ones take their places.
    Raises InvalidInput for a batch size below 1, an unknown policy, an empty workload, or arrivals in seconds.
    """
    if max_batch_size < 1:
        raise InvalidInput(f"max_batch_size is {max_batch_size}, but a batch has at least 1 place")
    if not workload.requests or workload.arrival_unit != "iterations":
        raise InvalidInput(f"the workload {workload.name} must have requests, with arrivals in iterations")
    for request in workload.requests:
        if request.prompt_len < 1 or request.output_len < 1 or not 0 <= request.arrival < math.inf:
            raise InvalidInput(f"request {request.request_id} of {workload.name} has an impossible length or arrival: lengths start at 1, arrivals at 0")
    requests = sorted(workload.requests, key=lambda r: r.arrival)
    if policy == "request":
        rows, busy = _request_level(requests, max_batch_size)
    elif policy == "iteration":
        rows, busy = _iteration_level(requests, max_batch_size)
    else:
        raise InvalidInput(f"the policy {policy!r} is unknown: take request or iteration")
    return BatchSchedule(policy, tuple(rows), max_batch_size, busy, max(row.returned for row in rows))


def _row(request: WorkloadRequest, start: int, returned: int, place: int) -> BatchRow:
    arrival, end = math.ceil(request.arrival), start + request.output_len
    stretches: tuple[tuple[int, int, Activity], ...] = (
        (arrival, start, "waits"),
        (start, start + 1, "prompt"),
        (start + 1, end, "decode"),
        (end, returned, "padding"),
    )
    segments = tuple(Segment(first, last, activity) for first, last, activity in stretches if last > first)
    return BatchRow(request.request_id, arrival, start, end, returned, place, segments)


def _request_level(requests: list[WorkloadRequest], max_batch_size: int) -> tuple[list[BatchRow], int]:
    """Rows, and how many iterations ran."""
    rows: list[BatchRow] = []
    now = busy = 0
    while len(rows) < len(requests):
        now = max(now, math.ceil(requests[len(rows)].arrival))
        batch = [r for r in requests[len(rows) : len(rows) + max_batch_size] if r.arrival <= now]
        length = max(r.output_len for r in batch)
        rows += [_row(request, now, now + length, place) for place, request in enumerate(batch)]
        now += length
        busy += length
    return rows, busy


def _iteration_level(requests: list[WorkloadRequest], max_batch_size: int) -> tuple[list[BatchRow], int]:
    """Rows, and how many iterations ran. A request starts when it is there, everybody before it has started, and a place is free."""
    rows: list[BatchRow] = []
    free = list(range(max_batch_size))
    ends: list[tuple[int, int]] = []  # (first iteration without it, place)
    now = busy = busy_until = 0
    for request in requests:
        now = max(now, math.ceil(request.arrival))
        if not free:
            now = max(now, ends[0][0])
        while ends and ends[0][0] <= now:
            heapq.heappush(free, heapq.heappop(ends)[1])
        place = heapq.heappop(free)
        row = _row(request, now, now + request.output_len, place)
        heapq.heappush(ends, (row.end, place))
        busy += max(0, row.end - max(row.start, busy_until))
        busy_until = max(busy_until, row.end)
        rows.append(row)
    return rows, busy
