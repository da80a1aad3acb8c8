"""What the paper's scheduler tells the worker each iteration, and what the worker answers. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.core.output import SampledToken, SamplingParams
from engine.trace.frame import WorkerRow


@dataclass(frozen=True)
class ScheduledSequence:
    """One sequence's part of the iteration: tokens num_computed_tokens .. num_computed_tokens + num_scheduled_tokens - 1 of `token_ids` are computed.

    `token_ids`: prompt and outputs, all that are known. `block_ids`: the whole block table as it must be when the iteration runs (after copy-on-write).
    `draws`: one entry per token that is to be drawn from the logits of the last position; more than one only where a prompt's samples go apart. Each stream of
    random numbers is known by `draw_names[i]`, the sequence it belongs to, and goes on from iteration to iteration. `num_logprobs`: how many of the most
    probable tokens are asked for with their log-probabilities (beam search), 0 for none. Neither: nothing is sampled (a prefix).
    `num_output_tokens`: outputs so far, which tells the sampler which forced token is next.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    draws: tuple[SamplingParams, ...] = ()
    draw_names: tuple[str, ...] = ()
    num_logprobs: int = 0
    token_ids_asked: tuple[int, ...] = ()
    """Tokens whose log-probability is wanted whatever their rank: those that a scenario forces."""


@dataclass(frozen=True)
class IterationPlan:
    """One iteration. The worker first swaps out, then swaps in, then copies (all pairs are source, destination), then computes. `finished`: sequences that
    are gone."""

    sequences: tuple[ScheduledSequence, ...]
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    finished: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceOutput:
    """What came of one sequence: `sampled[i]` for `draws[i]`; `logprobs`: token id -> natural logarithm of its probability, most probable first (ties: lower id
    first), then those of `token_ids_asked` that are not among them."""

    sampled: tuple[SampledToken, ...] = ()
    logprobs: dict[int, float] = field(default_factory=dict)


class IterationRunner(Protocol):
    """What runs an iteration: `engine.worker.sequence_runner.SequenceRunner` on a model, `engine.paper_bookkeeping.PaperBookkeepingRunner` without one."""

    @property
    def slot_mapping(self) -> tuple[int, ...]: ...

    def rows(self) -> tuple[WorkerRow, ...]: ...

    def execute(self, plan: IterationPlan) -> dict[str, SequenceOutput]:
        """Run one iteration; answers for every scheduled sequence."""
        ...
