"""The comparison of Figure 2: the same requests served by Orca's three reservations and by paging, with the same memory; what is in the slots, over time.

The clock counts iterations. In each, every running request gets one token; its first iteration also computes the prompt. The token of an iteration has its
slot in that iteration, so that a request of P prompt and O output tokens runs for O iterations and has P + k tokens in its k-th, P + O in the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import InvalidInput
from engine.paper.buddy_allocator import BuddyAllocator
from engine.paper.contiguous_simulation import run_contiguous
from engine.paper.memory_integrals import MemorySnapshot, Shares, SlotTimes
from engine.paper.paged_simulation import PagedSimulation
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS, System, reserved_slots
from engine.paper.simulation_log import Progress, SimulationLog
from engine.paper.workload import Workload, WorkloadRequest

MAX_BATCH_POINTS = 2_000
WATERMARK = 0.01
"""Share of the blocks that vLLM's first release leaves free when it admits a request, so that it is not preempted at once; the paper does not speak of it."""


@dataclass(frozen=True)
class RefusedRequest:
    """A request that was never tried: it could not be served with this memory or this model, however long it waits. `reason` is one sentence."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class SimulationResult:
    """What came out of one run of one system.

    `shares`: percent of all slots by what they hold, averaged over the iterations in which requests run; `shares_while_waiting`: over those of them in which
    somebody also waits, so that free slots are ones that nobody could use. `times`, `times_while_waiting`: the same as exact sums of slots times iterations.
    `batch_sizes`: (iteration, running requests from then on), every change; a long run is thinned to means over equal spans and then ends with (end, 0) as
    well.
    `snapshot`: the slots in one iteration. `num_iterations`: those in which something ran. `end`: the first iteration after the last one.
    """

    system: System
    workload_name: str
    num_slots: int
    block_size: int
    max_model_len: int
    num_requests: int
    shares: Shares
    shares_while_waiting: Shares
    times: SlotTimes
    times_while_waiting: SlotTimes
    mean_batch_size: float
    mean_batch_size_while_waiting: float
    peak_batch_size: int
    batch_sizes: list[tuple[int, float]]
    num_iterations: int
    end: int
    num_preemptions: int
    num_output_tokens: int
    refused: tuple[RefusedRequest, ...]
    snapshot: MemorySnapshot | None

    @property
    def name(self) -> str:
        """The paper's name of the system."""
        return SYSTEM_NAMES[self.system]


def simulate(
    workload: Workload,
    system: System,
    *,
    num_slots: int,
    block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 256,
    watermark: float = WATERMARK,
    snapshot_at: int | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Serve the workload (arrivals in iterations) with `num_slots` token slots of KV cache and say what was in them. Deterministic; the workload is not
    changed.

    `block_size` and `watermark` (share of the blocks that admission leaves free) matter to ``paged`` alone. `snapshot_at`: the iteration whose slots are kept;
    None: that in which half of the requests have been admitted. Requests that can never be served (longer than `max_model_len`, or than the memory) are
    refused and counted. Time grows with the number of requests and of blocks, not with that of iterations or slots.
    Raises InvalidInput for sizes that cannot be, an unknown system, arrivals in seconds, or a workload without requests.
    """
    _check(workload, system, num_slots=num_slots, block_size=block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, watermark=watermark)
    served, refused = [], []
    largest = BuddyAllocator(num_slots).largest_chunk
    for request in sorted(workload.requests, key=lambda r: r.arrival):
        reason = _why_refused(request, system, largest, num_slots, block_size, max_model_len)
        if reason is None:
            served.append(request)
        else:
            refused.append(RefusedRequest(request.request_id, reason))
    arrivals = [math.ceil(r.arrival) for r in served]
    log = SimulationLog(num_slots, max(1, len(served)), snapshot_at, progress)
    if system == "paged":
        watermark_blocks = int(watermark * (num_slots // block_size))
        PagedSimulation(served, arrivals, block_size=block_size, max_num_seqs=max_num_seqs, watermark_blocks=watermark_blocks, log=log).run()
    else:
        run_contiguous(served, arrivals, system, max_model_len=max_model_len, max_num_seqs=max_num_seqs, log=log)
    busy, waiting = log.all, log.while_waiting
    return SimulationResult(
        system=system,
        workload_name=workload.name,
        num_slots=num_slots,
        block_size=block_size,
        max_model_len=max_model_len,
        num_requests=len(served),
        shares=busy.shares(),
        shares_while_waiting=waiting.shares(),
        times=busy,
        times_while_waiting=waiting,
        mean_batch_size=busy.batch / busy.iterations if busy.iterations else 0.0,
        mean_batch_size_while_waiting=waiting.batch / waiting.iterations if waiting.iterations else 0.0,
        peak_batch_size=max((n for _, n in log.batch_sizes), default=0),
        batch_sizes=thinned(log.batch_sizes, log.end),
        num_iterations=busy.iterations,
        end=log.end,
        num_preemptions=log.num_preemptions,
        num_output_tokens=sum(r.output_len for r in served),
        refused=tuple(refused),
        snapshot=log.snapshot,
    )


def compare(
    workload: Workload, *, num_slots: int, systems: Iterable[System] = SYSTEMS, block_size: int = 16, max_model_len: int = 2048, max_num_seqs: int = 256,
    watermark: float = WATERMARK, progress: Progress | None = None,
) -> dict[System, SimulationResult]:  # fmt: skip
    """`simulate` for several systems, in their order. `progress` runs once from 0 to 1 over all of them. Raises as `simulate` does."""
    names = tuple(systems)
    results: dict[System, SimulationResult] = {}
    for done, system in enumerate(names):
        tell = None if progress is None else (lambda part, done=done: progress((done + part) / len(names)))
        results[system] = simulate(
            workload,
            system,
            num_slots=num_slots,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            watermark=watermark,
            progress=tell,
        )
    return results


def thinned(batch_sizes: list[tuple[int, int]], end: int, max_points: int = MAX_BATCH_POINTS) -> list[tuple[int, float]]:
    """All changes, closed by (end, 0), if they are few; else `max_points` means over equal spans of time, each at the span's first iteration, closed
    likewise."""
    if not batch_sizes:
        return []
    first = batch_sizes[0][0]
    if len(batch_sizes) <= max_points:
        return [*batch_sizes, (end, 0)]
    means: list[tuple[int, float]] = []
    at = 0
    for point in range(max_points):
        start, stop = first + (end - first) * point // max_points, first + (end - first) * (point + 1) // max_points
        total = 0
        while True:
            until = batch_sizes[at + 1][0] if at + 1 < len(batch_sizes) else end
            total += batch_sizes[at][1] * (min(until, stop) - max(batch_sizes[at][0], start))
            if until > stop or at + 1 == len(batch_sizes):
                break
            at += 1
        means.append((start, total / (stop - start)))
    return [*means, (end, 0)]


def _check(workload: Workload, system: str, *, watermark: float, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InvalidInput(f"{name} is {size}, but it must be at least 1")
    if sizes["block_size"] > sizes["num_slots"]:
        raise InvalidInput(
            f"block_size is {sizes['block_size']}, but the whole memory has only {sizes['num_slots']} slots: make blocks smaller or memory larger"
        )
    if system not in SYSTEMS:
        raise InvalidInput(f"the system {system!r} is unknown: take one of {', '.join(SYSTEMS)}")
    if not 0 <= watermark < 1:
        raise InvalidInput(f"watermark is {watermark}, but it is a share of the pool: at least 0 and below 1")
    if not workload.requests:
        raise InvalidInput(f"the workload {workload.name} has no requests: take another one")
    if workload.arrival_unit != "iterations":
        raise InvalidInput(f"the arrivals of {workload.name} are in seconds: say how many iterations a second has, or let all arrive at once")
    for request in workload.requests:
        if request.prompt_len < 1 or request.output_len < 1 or not 0 <= request.arrival < math.inf:
            raise InvalidInput(
                f"request {request.request_id} of {workload.name} has arrival {request.arrival}, prompt {request.prompt_len} and output {request.output_len}, "
                "but lengths start at 1 and arrivals at 0"
            )


def _why_refused(request: WorkloadRequest, system: System, largest_chunk: int, num_slots: int, block_size: int, max_model_len: int) -> str | None:
    total = request.prompt_len + request.output_len
    if total > max_model_len:
        return f"its {request.prompt_len} prompt and {request.output_len} output tokens are more than the model's {max_model_len} positions"
    if system == "paged":
        if -(-total // block_size) > num_slots // block_size:
            return f"its {total} tokens need more blocks than the {num_slots // block_size} there are"
    elif reserved_slots(system, request, max_model_len) > largest_chunk:
        return f"its reservation of {reserved_slots(system, request, max_model_len)} slots is more than the largest chunk, {largest_chunk}"
    return None
