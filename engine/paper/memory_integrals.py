"""Exact sums over time of what the slots of a KV cache hold: whole numbers of slots times iterations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SlotTimes:
    """Slots times iterations. `rounding`: what the allocator's chunks have beyond the reservation; `free`: slots in no chunk or block; both are external
    fragmentation. All five add up to num_slots * `iterations`. `batch`: running requests times iterations."""

    iterations: int = 0
    token_states: int = 0
    reservation: int = 0
    internal: int = 0
    rounding: int = 0
    free: int = 0
    batch: int = 0

    def add(self, iterations: int, token_states: int, reservation: int, internal: int, rounding: int, free: int, batch: int) -> None:
        """Add a stretch of time: `iterations` long, all others already multiplied by their time."""
        self.iterations += iterations
        self.token_states += token_states
        self.reservation += reservation
        self.internal += internal
        self.rounding += rounding
        self.free += free
        self.batch += batch

    def shares(self) -> Shares:
        """In percent of all slots. All zero where no time passed."""
        total = self.token_states + self.reservation + self.internal + self.rounding + self.free
        if not total:
            return Shares(0.0, 0.0, 0.0, 0.0, 0.0)
        percents = (100 * slots / total for slots in (self.token_states, self.reservation, self.internal, self.rounding, self.free))
        return Shares(*percents)


@dataclass(frozen=True)
class Shares:
    """Percent of the KV cache's slots, averaged over time; the bars of Figure 2. `external` = `rounding` + `free`."""

    token_states: float
    reservation: float
    internal: float
    rounding: float
    free: float

    @property
    def external(self) -> float:
        """External fragmentation and others: what the allocator rounds up, and slots in no chunk."""
        return self.rounding + self.free


@dataclass(frozen=True)
class MemoryChunk:
    """Slots start .. start+size-1: a request's chunk, or one of its blocks (`logical_index`). used + reserved + internal + rounding = size."""

    start: int
    size: int
    used: int
    reserved: int
    internal: int
    rounding: int
    request_id: str
    logical_index: int | None = None


@dataclass(frozen=True)
class MemorySnapshot:
    """All slots in one iteration, for a drawing to scale. `chunks` by start. `gaps`: (start, size) of the free stretches between them."""

    iteration: int
    num_slots: int
    chunks: tuple[MemoryChunk, ...]

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        gaps = []
        end = 0
        for chunk in self.chunks:
            if chunk.start > end:
                gaps.append((end, chunk.start - end))
            end = chunk.start + chunk.size
        if end < self.num_slots:
            gaps.append((end, self.num_slots - end))
        return tuple(gaps)
