"""What a memory simulation writes down: time integrals, the batch size over time, one snapshot, and how far it is."""

from __future__ import annotations

from collections.abc import Callable

from engine.paper.memory_integrals import MemoryChunk, MemorySnapshot, SlotTimes

Progress = Callable[[float], None]


class SimulationLog:
    """Filled by one run. `progress`: called with the finished share, 0 to 1, about a hundred times."""

    def __init__(self, num_slots: int, num_requests: int, snapshot_at: int | None, progress: Progress | None) -> None:
        self.num_slots = num_slots
        self.all = SlotTimes()
        self.while_waiting = SlotTimes()
        self.batch_sizes: list[tuple[int, int]] = []
        self.snapshot: MemorySnapshot | None = None
        self.num_preemptions = 0
        self.num_admitted = 0
        """Requests that ever ran."""
        self.end = 0
        """The first iteration after the last one."""
        self._num_requests = num_requests
        self._num_finished = 0
        self._snapshot_at = snapshot_at
        self._progress = progress
        self._told = 0

    def stretch(self, start: int, end: int, running: int, *, waiting: bool, sums: tuple[int, int, int, int, int]) -> None:
        """Iterations start .. end-1, in which `running` requests run. `sums`: token states, reservation, internal, rounding, free, times their time."""
        self.all.add(end - start, *sums, running * (end - start))
        if waiting:
            self.while_waiting.add(end - start, *sums, running * (end - start))
        if self.end < start and self.end:
            self.batch_sizes.append((self.end, 0))
        if not self.batch_sizes or self.batch_sizes[-1][1] != running:
            self.batch_sizes.append((start, running))
        self.end = end

    def finished(self, count: int) -> None:
        self._num_finished += count
        percent = 100 * self._num_finished // self._num_requests
        if self._progress is not None and percent > self._told:
            self._told = percent
            self._progress(percent / 100)

    def maybe_snapshot(self, start: int, end: int, chunks_at: Callable[[int], list[MemoryChunk]]) -> None:
        """Keep the state of the wanted iteration if it lies in start .. end-1; without a wish, of the one in which half of the requests have been admitted."""
        if self.snapshot is not None or end <= start:
            return
        wanted = self._snapshot_at
        if wanted is None:
            if 2 * self.num_admitted < self._num_requests:
                return
            wanted = start
        if start <= wanted < end:
            self.snapshot = MemorySnapshot(wanted, self.num_slots, tuple(sorted(chunks_at(wanted), key=lambda c: c.start)))
