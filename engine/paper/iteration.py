"""An iteration while it is being planned: whose tokens, how many, and what must be moved before."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.paper.beam_search import num_candidates_per_beam
from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.sequence import Sequence, SequenceGroup
from engine.paper.step import IterationPlan, ScheduledSequence


@dataclass
class Iteration:
    """What is decided so far. `groups`: those scheduled, in order; `num_scheduled_tokens`: of their sequences, by id, in order; `preempted`: any group was."""

    token_budget: int
    groups: list[SequenceGroup] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: bool = False

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule `num_tokens` of the sequence."""
        self.num_scheduled_tokens[sequence.sequence_id] = num_tokens
        self.token_budget -= num_tokens
        if not self.groups or self.groups[-1] is not sequence.group:
            self.groups.append(sequence.group)


def num_tokens_of(group: SequenceGroup, token_budget: int) -> list[int]:
    """How many tokens each living sequence of the group computes within the budget.

    All that is not computed yet, if that fits. A group that does not fit gets on as far as the budget goes, sequence after sequence, but every last token is
    held back: the group's next tokens are chosen together, so their logits must come from one iteration. Whoever shares blocks that an earlier sequence
    has still to compute comes after it here, and so gets nothing before. Only recomputations are cut like this, when prompt and
    outputs are more than an iteration may hold; the paper leaves the case open, since its budget is never smaller than a sequence."""
    wanted = [sequence.num_uncomputed_tokens for sequence in group.living]
    if sum(wanted) <= token_budget:
        return wanted
    given: list[int] = []
    for num_wanted in wanted:
        given.append(min(num_wanted - 1, token_budget))
        token_budget -= given[-1]
    return given


def make_plan(iteration: Iteration, manager: BlockSpaceManager, finished: list[str]) -> IterationPlan:
    """The iteration as the worker gets it. To be called before num_computed_tokens moves on."""
    scheduled = [
        _scheduled(sequence, iteration.num_scheduled_tokens[sequence.sequence_id], manager)
        for group in iteration.groups
        for sequence in group.living
        if sequence.sequence_id in iteration.num_scheduled_tokens
    ]
    pairs = (tuple(iteration.swap_out), tuple(iteration.swap_in), tuple(iteration.copies))
    return IterationPlan(tuple(scheduled), *pairs, finished=tuple(finished))


def _scheduled(sequence: Sequence, num_tokens: int, manager: BlockSpaceManager) -> ScheduledSequence:
    group = sequence.group
    samples: list[int] = []
    num_logprobs = 0
    asked: tuple[int, ...] = ()
    if num_tokens == sequence.num_uncomputed_tokens and not group.spec.is_prefix:
        if group.spec.beam_width is not None:
            num_logprobs = num_candidates_per_beam(group.spec.beam_width, len(group.spec.stop_token_ids))
            asked = forced_tokens_after(sequence)
        else:
            samples = [sequence.index] if group.is_forked else list(range(group.spec.n))
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids),
        block_ids=manager.block_ids(sequence.sequence_id),
        num_computed_tokens=sequence.num_computed_tokens,
        num_scheduled_tokens=num_tokens,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        draws=tuple(group.sampling_params(i) for i in samples),
        draw_names=tuple(group.sequence_id(i) for i in samples),
        num_logprobs=num_logprobs,
        token_ids_asked=asked,
    )


def forced_tokens_after(sequence: Sequence) -> tuple[int, ...]:
    """The tokens that the scenario lets this beam go on with in the group's next selection."""
    group = sequence.group
    number, parent = sequence.num_output_tokens, group.living.index(sequence)
    survivors = group.spec.forced_beams[number] if number < len(group.spec.forced_beams) else ()
    return tuple(token_id for index, token_id in survivors if index == parent)
