"""How long work takes on a GPU, and how much time a whole run may take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Work = Callable[[], object]


class Timer(Protocol):
    """`milliseconds(works)`: of one of them, on average, when all of them are done one after the other. `graph`: whether they can be captured in a CUDA graph,
    which is so unless they need something from the host."""

    def milliseconds(self, works: Sequence[Work], graph: bool = True) -> float: ...


class EventTimer:
    """CUDA events around the replay of a graph that does all works many times over: the time of the GPU, without that of the host that launches. What cannot be
    captured in a graph is launched from the host instead. The median of several, after a warm-up that compiles."""

    def __init__(self, at_least_ms: float = 20.0, repeats: int = 5) -> None:
        self.at_least_ms, self.repeats = at_least_ms, repeats

    def milliseconds(self, works: Sequence[Work], graph: bool = True) -> float:
        for _ in range(2):
            for work in works:
                work()
        torch.cuda.synchronize()
        once = self._events(lambda: [work() for work in works])
        rounds = max(1, min(200, round(self.at_least_ms / max(once, 1e-3))))

        def everything() -> None:
            for _ in range(rounds):
                for work in works:
                    work()

        replay: Work = everything
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                everything()
            replay = captured.replay
        replay()
        samples = [self._events(replay) for _ in range(self.repeats)]
        return statistics.median(samples) / (rounds * len(works))

    def _events(self, work: Work) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


class ClockTimer:
    """The wall clock, for a CPU."""

    def milliseconds(self, works: Sequence[Work], graph: bool = True) -> float:
        started = time.perf_counter()
        for work in works:
            work()
        return (time.perf_counter() - started) * 1000 / len(works)


class Budget:
    """Seconds for a run, whose cases come in ascending size. The last one tells how long the next will take; one that would not fit is dropped, and named at
    the end."""

    MARGIN = 1.5
    """A case is expected to take this many times as long as the one before, if it is as large, and longer in proportion to its bytes."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._last: tuple[float, int] | None = None
        self.dropped: list[str] = []

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def expected(self, num_bytes: int) -> float:
        """Seconds that a case of so many bytes may take; 0 where nothing was measured yet."""
        if self._last is None:
            return 0.0
        seconds, size = self._last
        return self.MARGIN * seconds * max(1.0, num_bytes / size)

    def run(self, name: str, num_bytes: int, work: Work) -> bool:
        """Do `work`, or drop it when it would not fit; whether it was done."""
        if self.left <= self.expected(num_bytes):
            self.dropped.append(name)
            return False
        started = self._clock()
        work()
        self._last = self._clock() - started, num_bytes
        return True
