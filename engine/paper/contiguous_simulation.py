"""Orca's memory over time: one contiguous chunk per request, from a buddy allocator, from event to event."""

from __future__ import annotations

import heapq

from engine.paper.buddy_allocator import BuddyAllocator
from engine.paper.memory_integrals import MemoryChunk
from engine.paper.reservation import System, reserved_slots, split_of
from engine.paper.simulation_log import SimulationLog
from engine.paper.workload import WorkloadRequest


def run_contiguous(requests: list[WorkloadRequest], arrivals: list[int], system: System, *, max_model_len: int, max_num_seqs: int, log: SimulationLog) -> None:
    """Admit `requests` (by arrival) first come, first served, each as soon as its chunk can be had; nobody overtakes. Every request must fit into the empty
    line.

    Nothing changes between two events (an arrival, an end), except that each running request turns one reserved slot into a token state per iteration; so
    whole stretches are added up at once. Mutates `log`.
    """
    allocator = BuddyAllocator(log.num_slots)
    ends: list[tuple[int, int]] = []  # (first iteration without it, index)
    places: dict[int, tuple[int, int]] = {}  # index -> (start slot, first iteration)
    now = admitted = arrived = 0
    # token states in iteration t are `tokens` + len(ends) * t, slots that will be used later `later` - len(ends) * t
    tokens = later = internal = rounding = 0
    blocked = False  # the head of the queue asked in vain, and nothing was freed since

    def chunks_at(iteration: int) -> list[MemoryChunk]:
        chunks = []
        for index, (start, first) in places.items():
            request = requests[index]
            num_slots = reserved_slots(system, request, max_model_len)
            split = split_of(request, iteration - first + 1, num_slots)
            size = allocator.chunk_size(num_slots)
            chunks.append(MemoryChunk(start, size, split.token_states, split.reserved, split.internal, size - num_slots, request.request_id))
        return chunks

    while admitted < len(requests) or ends:
        while ends and ends[0][0] <= now:
            index = heapq.heappop(ends)[1]
            request = requests[index]
            start, first = places.pop(index)
            num_slots = reserved_slots(system, request, max_model_len)
            allocator.free(start)
            tokens -= request.prompt_len + 1 - first
            later -= request.output_len - 1 + first
            internal -= num_slots - request.prompt_len - request.output_len
            rounding -= allocator.chunk_size(num_slots) - num_slots
            blocked = False
            log.finished(1)
        while arrived < len(requests) and arrivals[arrived] <= now:
            arrived += 1
        while admitted < arrived and not blocked and len(ends) < max_num_seqs:
            request = requests[admitted]
            num_slots = reserved_slots(system, request, max_model_len)
            place = allocator.allocate(num_slots)
            if place is None:
                blocked = True
                break
            places[admitted] = (place, now)
            heapq.heappush(ends, (now + request.output_len, admitted))
            tokens += request.prompt_len + 1 - now
            later += request.output_len - 1 + now
            internal += num_slots - request.prompt_len - request.output_len
            rounding += allocator.chunk_size(num_slots) - num_slots
            admitted += 1
            log.num_admitted += 1
        until = ends[0][0] if ends else arrivals[arrived] if arrived < len(requests) else now
        if arrived < len(requests):
            until = min(until, arrivals[arrived])
        if ends:
            span = until - now
            running = len(ends)
            times = running * (now + until - 1) * span // 2  # running * (now + … + until-1)
            log.stretch(now, until, running, waiting=admitted < arrived, sums=(
                tokens * span + times, later * span - times, internal * span, rounding * span, allocator.num_free * span
            ))  # fmt: skip
        log.maybe_snapshot(now, until, chunks_at)
        now = until
