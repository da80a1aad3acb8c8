"""Beam search (section 4.4): which candidates go on. Pure: no sequence, no block is touched.

The rule is that of transformers' beam search with `early_stopping=False`, so that a run can be compared with it token by token: of all continuations of all
beams the best few are looked at; those that end join the finished ones, if they are among the best `beam_width`; the best `beam_width` others go on; the
search is over when no running beam could still beat the worst of `beam_width` finished ones at its present length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A continuation: beam `parent` (its index among the living, best first) followed by `token_id`. `cumulative_logprob`: None where no model ran."""

    parent: int
    token_id: int
    cumulative_logprob: float | None
    forced: bool = False


@dataclass(frozen=True)
class Selection:
    """What came of one selection: `candidates` best first, and as indices into them, `running` (who goes on, best first) and `finished` (who ends here and is
    good enough to be kept). `is_over`: nobody goes on although some could, because none could beat the finished ones."""

    candidates: list[Candidate]
    running: list[int]
    finished: list[int]
    is_over: bool


class Hypotheses(Generic[T]):
    """The best `beam_width` finished beams, best first, as (score, what they are); the score is None where no model ran. Earlier ones win ties."""

    def __init__(self, beam_width: int, length_penalty: float) -> None:
        self.beam_width = beam_width
        self.length_penalty = length_penalty
        self.entries: list[tuple[float | None, T]] = []

    def score(self, cumulative_logprob: float | None, num_output_tokens: int) -> float | None:
        """A beam's log-probability per outputs to the power of the length penalty."""
        return None if cumulative_logprob is None else cumulative_logprob / float(num_output_tokens) ** self.length_penalty

    def accepts(self, scores: Sequence[float | None]) -> list[bool]:
        """Which of `scores`, all finished at once, would be among the best `beam_width`. Changes nothing."""
        merged = [(score, -1) for score, _ in self.entries] + [(score, i) for i, score in enumerate(scores)]
        kept = {i for _, i in sorted(merged, key=lambda entry: _best_first(entry[0]))[: self.beam_width]}
        return [i in kept for i in range(len(scores))]

    def add(self, score: float | None, what: T) -> None:
        """One more finished beam; the worst falls out when there are more than `beam_width`."""
        self.entries = sorted([*self.entries, (score, what)], key=lambda entry: _best_first(entry[0]))[: self.beam_width]


def num_candidates_per_beam(beam_width: int, num_stop_tokens: int) -> int:
    """How many continuations are looked at, and must be known of each beam: enough that `beam_width` can go on even if every beam's stop tokens rank first."""
    return max(2, 1 + num_stop_tokens) * beam_width


def _best_first(score: float | None) -> float:
    return -score if score is not None else 0.0


def rank_candidates(cumulative_logprobs: Sequence[float | None], logprobs: Sequence[dict[int, float]], limit: int) -> list[Candidate]:
    """The best `limit` continuations of all beams, best first; of equal ones first the better beam's, then the lower token id. `logprobs[i]`: token id ->
    natural logarithm of its probability after beam i."""
    candidates: list[Candidate] = []
    for parent, (known, so_far) in enumerate(zip(logprobs, cumulative_logprobs, strict=True)):
        candidates += [Candidate(parent, token_id, (so_far or 0.0) + logprob) for token_id, logprob in known.items()]
    candidates.sort(key=lambda c: (_best_first(c.cumulative_logprob), c.parent, c.token_id))
    return candidates[:limit]


def select(
    candidates: list[Candidate], hypotheses: Hypotheses[T], ends: Callable[[Candidate], bool], num_output_tokens: int, is_last: bool
) -> Selection:  # fmt: skip
    """Choose among `candidates` (best first). `num_output_tokens`: of each candidate; `is_last`: all of them are as long as they may get. Changes nothing."""
    width = hypotheses.beam_width
    ending = [is_last or ends(c) for c in candidates]
    running = [i for i, end in enumerate(ending) if not end][:width]
    ended = [i for i, end in enumerate(ending[:width]) if end]
    scores = [hypotheses.score(candidates[i].cumulative_logprob, num_output_tokens) for i in ended]
    kept = [i for i, accepted in zip(ended, hypotheses.accepts(scores), strict=True) if accepted]
    is_over = False
    finished = [score for score, _ in hypotheses.entries] + [score for i, score in zip(ended, scores, strict=True) if i in kept]
    if running and len(finished) >= width:
        best = hypotheses.score(candidates[running[0]].cumulative_logprob, num_output_tokens)
        worst = sorted(finished, key=_best_first)[width - 1]
        is_over = best is None or worst is None or best <= worst
    return Selection(candidates, [] if is_over else running, kept, is_over)


def select_forced(
    survivors: Sequence[tuple[int, int]],
    ranked: list[Candidate],
    logprobs: Sequence[dict[int, float]],
    cumulative_logprobs: Sequence[float | None],
    ends: Callable[[Candidate], bool],
    is_last: bool,
) -> Selection:
    """The scenario dictates who goes on: `survivors` as (parent, token id), best first. `ranked`: what the model would have looked at, empty without one; it is
    shown behind the dictated ones. Never decides that the search is over before all are as long as they may get."""
    forced: list[Candidate] = []
    for parent, token_id in survivors:
        logprob = logprobs[parent].get(token_id)
        total = None if logprob is None else (cumulative_logprobs[parent] or 0.0) + logprob
        forced.append(Candidate(parent, token_id, total, forced=True))
    chosen = {(c.parent, c.token_id) for c in forced}
    candidates = forced + [c for c in ranked if (c.parent, c.token_id) not in chosen]
    ending = [is_last or ends(c) for c in forced]
    running = [i for i, end in enumerate(ending) if not end]
    return Selection(candidates, running, [i for i, end in enumerate(ending) if end], is_over=False)
