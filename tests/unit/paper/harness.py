"""A scheduler of the paper's engine whose worker dictates: forced tokens as they are forced, beams as they are forced, and a log of all that was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.core.output import SampledToken
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.step import IterationPlan, SequenceOutput
from engine.trace.events import Cause, CauseKind, Event
from tests.property.paper_model import check_books

E = TypeVar("E", bound=Event)
FORCED = Cause(CauseKind.FORCED)


@dataclass
class Log:
    """Hears every event, each of which must find the books in order."""

    scheduler: PaperScheduler | None = None
    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if self.scheduler is not None:
            check_books(self.scheduler)
        self.events.append(event)

    def of(self, kind: type[E], request_id: str | None = None) -> list[E]:
        return [event for event in self.events if isinstance(event, kind) and request_id in (None, event.request_id)]


class Driven:
    """`config` and requests; `step()` plans an iteration and answers it with forced tokens (20 where none is forced)."""

    def __init__(self, *specs: PaperRequestSpec, **config: Any) -> None:
        self.log = Log()
        self.scheduler = PaperScheduler(PaperConfig(**{"block_size": 4, **config}), self.log)
        self.log.scheduler = self.scheduler
        self.manager = self.scheduler.block_manager
        for spec in specs:
            self.scheduler.add_request(spec)

    def step(self, times: int = 1) -> IterationPlan:
        for _ in range(times):
            plan = self.scheduler.schedule()
            self.scheduler.update_from_output({sequence.sequence_id: _answer(sequence.draws, sequence.num_output_tokens) for sequence in plan.sequences})
        return plan

    def run(self) -> list[IterationPlan]:
        plans: list[IterationPlan] = []
        while self.scheduler.has_unfinished_requests():
            plans.append(self.step())
            assert len(plans) < 200
        return plans

    def tables(self) -> dict[str, list[int]]:
        """Block ids of every sequence that has blocks."""
        return {sequence_id: list(self.manager.block_ids(sequence_id)) for sequence_id in self.manager.block_tables}

    def ref_counts(self) -> dict[int, int]:
        """Of the blocks that are referred to."""
        return {block.block_id: block.ref_cnt for block in self.manager.gpu_allocator.blocks if block.ref_cnt}

    def fills(self, sequence_id: str) -> list[int]:
        """Filled slots of each block of its table."""
        size, computed = self.manager.block_size, self.scheduler.sequences[sequence_id].num_computed_tokens
        return [max(0, min(size, computed - i * size)) for i in range(len(self.manager.block_ids(sequence_id)))]

    def free(self) -> tuple[list[int], list[int]]:
        """Both free queues, the GPU's and the CPU's."""
        return self.manager.gpu_allocator.free_block_ids, self.manager.cpu_allocator.free_block_ids

    def names(self, groups: str) -> list[str]:
        """Request ids in ``waiting``, ``running`` or ``swapped``."""
        return [group.request_id for group in getattr(self.scheduler, groups)]


def _answer(draws: tuple[Any, ...], number: int) -> SequenceOutput:
    return SequenceOutput(tuple(SampledToken(params.forced_token_ids[number] if number < len(params.forced_token_ids) else 20, FORCED) for params in draws))


def request(request_id: str, num_prompt: int, *outputs: tuple[int, ...], max_tokens: int | None = None, **more: Any) -> PaperRequestSpec:
    """A prompt 100, 101, … and one sample for each of `outputs`, which are forced."""
    most = max_tokens or max([len(sample) for sample in outputs], default=4)
    return PaperRequestSpec(request_id, tuple(range(100, 100 + num_prompt)), n=max(1, len(outputs)), max_tokens=most, forced_token_ids=outputs, **more)
