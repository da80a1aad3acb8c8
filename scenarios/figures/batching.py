"""The same arrivals, batched request by request and iteration by iteration (Orca's scheduling, section 2.2 of the paper)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field

from engine.errors import InvalidInput
from engine.paper.batching import BatchSchedule, Policy, schedule_batches
from engine.paper.workload import Workload, WorkloadRequest
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part
from scenarios.schema import RequestId

POLICIES: tuple[Policy, ...] = ("request", "iteration")


class Arrival(Part):
    """A request: it is there before iteration `arrival` (from 0) and generates `output_len` tokens, the first in the iteration that computes its prompt."""

    id: RequestId
    arrival: int = Field(ge=0, le=1000)
    prompt_len: int = Field(1, ge=1, le=100_000)
    output_len: int = Field(ge=1, le=1000)


class Parameters(Part):
    requests: list[Arrival] = Field(min_length=1, max_length=40)
    max_batch_size: int = Field(ge=1, le=40, description="places in the batch")


def compute(parameters: Parameters) -> FigureResult:
    """Both schedules. Raises InvalidInput for an id that is used twice."""
    ids = [r.id for r in parameters.requests]
    if len(set(ids)) < len(ids):
        raise InvalidInput(f"the id “{next(i for i in ids if ids.count(i) > 1)}” is used twice; give each request its own")
    workload = Workload("the figure's requests", "", tuple(WorkloadRequest(r.arrival, r.prompt_len, r.output_len, r.id) for r in parameters.requests))
    schedules = {policy: schedule_batches(workload, policy, parameters.max_batch_size) for policy in POLICIES}
    values: dict[str, Value] = {}
    for policy, schedule in schedules.items():
        values |= {f"{policy}.{name}": value for name, value in _values(schedule).items()}
    data: dict[str, Any] = {
        policy: {"name": s.name, "end": s.end, "rows": [asdict(row) | {"latency": row.latency} for row in s.rows]} for policy, s in schedules.items()
    }
    return FigureResult(values, {**data, "max_batch_size": parameters.max_batch_size, "values": values})


def _values(schedule: BatchSchedule) -> dict[str, Value]:
    starts: dict[str, Value] = {f"start.{row.request_id}": row.start for row in schedule.rows}
    returned: dict[str, Value] = {f"returned.{row.request_id}": row.returned for row in schedule.rows}
    return {
        "num_iterations": schedule.num_iterations,
        "padding": schedule.num_padding,
        "utilisation_percent": 100 * schedule.utilisation,
        "mean_latency": schedule.mean_latency,
        "latencies": [row.latency for row in schedule.rows],
        **starts,
        **returned,
    }
