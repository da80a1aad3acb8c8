"""vLLM's memory over time: blocks on demand, the latest request preempted by recomputation when the pool is empty, from event to event."""

from __future__ import annotations

import heapq
from collections import deque

from engine.paper.memory_integrals import MemoryChunk
from engine.paper.simulation_log import SimulationLog
from engine.paper.workload import WorkloadRequest


class PagedSimulation:
    """A pool of `num_slots` // `block_size` blocks; every request must fit into it alone. Slots that make no whole block count as free.

    An iteration, as in the paper's section 4.5 and vLLM's first release: running requests get a block where they need one, in order of arrival; where none is
    left, the latest running request loses all its blocks and goes back to the head of the queue. Only if nobody was preempted are waiting requests admitted, in
    order, while their prompt (after a preemption with what they had generated) and one more token fit and `watermark_blocks` stay free; with nobody running the
    watermark does not count. Everything is computed anew in one iteration when a request comes back. The release reckoned more roughly, a block for every
    running request, held to the watermark always, and gave a token its slot one iteration later.
    """

    def __init__(
        self, requests: list[WorkloadRequest], arrivals: list[int], *, block_size: int, max_num_seqs: int, watermark_blocks: int, log: SimulationLog
    ) -> None:
        self._requests = requests
        self._arrivals = arrivals
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._watermark_blocks = watermark_blocks
        self._log = log
        self._num_blocks = log.num_slots // block_size
        self._freed: list[int] = []
        """A stack: what was freed last is taken first, and only then blocks that were never taken, from 0 on."""
        self._num_fresh = 0
        """Blocks that were ever taken: also the id of the first that was not. Untouched blocks cost nothing, however large the memory is."""
        self._tables: dict[int, list[int]] = {}
        """Block ids of every running request."""
        self._since = [0] * len(requests)
        """For a running request t: the token generated in iteration i is number i - since; for others: -(tokens generated so far)."""
        self._boundary = [-1] * len(requests)
        self._latest: list[int] = []
        """Running requests in order of arrival, among them ones that ended; the running ones always arrived before the waiting ones."""
        self._preempted: deque[int] = deque()
        self._next = 0
        """The first request that was never admitted."""
        self._events: list[int] = []
        self._boundaries: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        # token states in iteration t are `tokens` + running * t
        self._tokens = self._internal = self._blocks_in_use = 0

    def run(self) -> None:
        """To the end of the last request. Mutates the log."""
        arrivals, log, tables, events = self._arrivals, self._log, self._tables, self._events
        num_requests, block_size = len(self._requests), self._block_size
        now = arrived = 0
        while self._next < num_requests or self._preempted or tables:
            while events and events[0] <= now:
                heapq.heappop(events)
            for index in self._ends.pop(now, ()):
                if index in tables and self._requests[index].output_len + self._since[index] < now:
                    self._leave(index)
                    log.finished(1)
            preempted = self._grow(now)
            while arrived < num_requests and arrivals[arrived] <= now:
                arrived += 1
            if not preempted:
                self._admit(now, arrived)
            waiting = self._next < arrived or bool(self._preempted)
            until = now + 1 if preempted else events[0] if events else arrivals[arrived] if arrived < num_requests else now
            if arrived < num_requests:
                until = min(until, arrivals[arrived])
            if tables:
                span, running = until - now, len(tables)
                tokens = self._tokens * span + running * (now + until - 1) * span // 2
                held = self._blocks_in_use * block_size * span
                internal = self._internal * span
                log.stretch(now, until, running, waiting=waiting, sums=(tokens, held - internal - tokens, internal, 0, log.num_slots * span - held))
            log.maybe_snapshot(now, until, self._chunks_at)
            now = until

    def _grow(self, now: int) -> bool:
        """Give every running request the block that it needs in iteration `now`; says whether somebody was preempted for it."""
        preempted = False
        size, requests, tables, boundary, freed = self._block_size, self._requests, self._tables, self._boundary, self._freed
        later: list[int] = []  # whose new block is not the last one: they need the next one all at the same time
        for index in sorted(self._boundaries.pop(now, ())):
            if boundary[index] != now:
                continue
            while self._blocks_in_use == self._num_blocks:
                latest = self._latest.pop()
                if latest in tables:
                    self._preempt(latest, now)
                    preempted = True
                    if latest == index:
                        break
            if index not in tables:
                continue
            table, request = tables[index], requests[index]
            if freed:
                table.append(freed.pop())
            else:
                table.append(self._num_fresh)
                self._num_fresh += 1
            self._blocks_in_use += 1
            beyond = len(table) * size - request.prompt_len - request.output_len
            if beyond < 0:
                boundary[index] = now + size
                later.append(index)
            else:
                boundary[index] = -1
                self._internal += beyond
        if later:
            self._event(self._boundaries, now + size, later)
        return preempted

    def _admit(self, now: int, arrived: int) -> None:
        tables = self._tables
        while len(tables) < self._max_num_seqs and (self._preempted or self._next < arrived):
            index = self._preempted[0] if self._preempted else self._next
            request = self._requests[index]
            generated = -self._since[index]
            needed = -(-(request.prompt_len + generated + 1) // self._block_size)
            if self._num_blocks - self._blocks_in_use - needed < (self._watermark_blocks if tables else 0):
                return
            if self._preempted:
                self._preempted.popleft()
            else:
                self._next += 1
                self._log.num_admitted += 1
            tables[index] = self._take(needed)
            self._since[index] = since = now - generated - 1
            self._tokens += request.prompt_len - since
            self._latest.append(index)
            self._event(self._ends, since + request.output_len + 1, [index])
            self._plan(index, needed)

    def _take(self, count: int) -> list[int]:
        """The next `count` free blocks; there must be so many."""
        self._blocks_in_use += count
        again = min(count, len(self._freed))
        taken = [self._freed.pop() for _ in range(again)]
        taken += range(self._num_fresh, self._num_fresh + count - again)
        self._num_fresh += count - again
        return taken

    def _plan(self, index: int, num_blocks: int) -> None:
        """Note when a request with so many blocks needs the next one; if these are its last, what of them it will never use counts from now on."""
        request = self._requests[index]
        beyond = num_blocks * self._block_size - request.prompt_len
        if beyond >= request.output_len:
            self._internal += beyond - request.output_len
            self._boundary[index] = -1
        else:
            self._boundary[index] = boundary = beyond + 1 + self._since[index]
            self._event(self._boundaries, boundary, [index])

    def _event(self, calendar: dict[int, list[int]], time: int, indices: list[int]) -> None:
        if time not in self._boundaries and time not in self._ends:
            heapq.heappush(self._events, time)
        calendar.setdefault(time, []).extend(indices)

    def _leave(self, index: int) -> None:
        """Take all blocks from a running request."""
        request = self._requests[index]
        table = self._tables.pop(index)
        self._freed.extend(reversed(table))
        self._blocks_in_use -= len(table)
        self._tokens -= request.prompt_len - self._since[index]
        self._internal -= max(0, len(table) * self._block_size - request.prompt_len - request.output_len)

    def _preempt(self, index: int, now: int) -> None:
        self._leave(index)
        self._since[index] = -(now - 1 - self._since[index])
        self._boundary[index] = -1
        self._preempted.appendleft(index)
        self._log.num_preemptions += 1

    def _chunks_at(self, iteration: int) -> list[MemoryChunk]:
        size = self._block_size
        chunks = []
        for index, table in self._tables.items():
            request = self._requests[index]
            states = request.prompt_len + iteration - self._since[index]
            total = request.prompt_len + request.output_len
            for logical, block in enumerate(table):
                used = min(size, max(0, states - logical * size))
                needed = min(size, max(0, total - logical * size))
                chunks.append(MemoryChunk(block * size, size, used, needed - used, size - needed, 0, request.request_id, logical))
        return chunks
