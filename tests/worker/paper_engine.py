"""The paper's scheduler and its worker in one loop, without a session: what the worker's tests run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedModel

from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import Sequence
from engine.paper.step import IterationPlan
from engine.trace.events import Event
from engine.worker.kernel_settings import KernelSettings
from engine.worker.sequence_runner import SequenceRunner
from tests.worker.hand_made_groups import poison
from tests.worker.harness import TORCH


class PaperEngine:
    """`forget_copies`: the worker is not told what to copy (the mutation). Pages are not-a-number until they are written."""

    def __init__(self, model: PreTrainedModel, config: PaperConfig, settings: KernelSettings = TORCH, forget_copies: bool = False) -> None:
        self.events: list[Event] = []
        self.scheduler = PaperScheduler(config, self.events.append)
        self.runner = SequenceRunner(model, config=config, max_model_len=160, kernel_settings=settings, emit=self.events.append)
        self._forget_copies = forget_copies
        poison(self.runner, range(config.num_blocks))

    def run(self, *specs: PaperRequestSpec) -> Iterator[IterationPlan]:
        """The prefixes among `specs` first, then everybody at `arrival_step`: the plan of every iteration, after it ran."""
        for spec in specs:
            if spec.is_prefix:
                self.scheduler.add_request(spec)
        yield from self._drain()
        start, others = self.scheduler.current_step, [spec for spec in specs if not spec.is_prefix]
        while others or self.scheduler.has_unfinished_requests():
            for spec in [s for s in others if s.arrival_step <= self.scheduler.current_step - start + 1]:
                others.remove(spec)
                self.scheduler.add_request(spec)
            yield self._iterate()

    def _drain(self) -> Iterator[IterationPlan]:
        while self.scheduler.has_unfinished_requests():
            yield self._iterate()

    def _iterate(self) -> IterationPlan:
        plan = self.scheduler.schedule()
        outputs = self.runner.execute(replace(plan, copies=()) if self._forget_copies else plan)
        self.scheduler.update_from_output(outputs)
        return plan

    def outputs(self, request_id: str) -> list[list[int]]:
        """Output tokens of each sample of a request, in order of birth."""
        return [sequence.output_token_ids for sequence in self.scheduler.groups[request_id].sequences]

    def hypotheses(self, request_id: str) -> list[tuple[float, Sequence]]:
        """The finished beams of a request, best first."""
        found = self.scheduler.groups[request_id].hypotheses
        assert found is not None
        return [(score, sequence) for score, sequence in found.entries if score is not None]
