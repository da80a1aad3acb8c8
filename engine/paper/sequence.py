"""Sequences and the groups they belong to (sections 4.4 and 4.5).

A request is a sequence group. It starts as one sequence; further ones are born by fork when the prompt is computed (parallel sampling) or whenever beams are
chosen. A group is scheduled, preempted and brought back as a whole.
"""

from __future__ import annotations

from enum import Enum

from engine.core.output import SamplingParams
from engine.paper.beam_search import Hypotheses
from engine.paper.config import PaperRequestSpec


class SequenceStatus(Enum):
    """vLLM's first release: SequenceStatus; here: a recomputed sequence waits as PREEMPTED, a provider's prefix ends as PREFIX_KEPT, and a beam that no
    candidate of the best goes on from ends as FINISHED_DROPPED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    PREFIX_KEPT = "prefix_kept"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_DROPPED = "dropped"

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is over; its value is then the reason."""
        return self.name.startswith("FINISHED_")


class Sequence:
    """One sequence of tokens and how far it has got.

    `token_ids`: prompt, then outputs. `num_computed_tokens`: how many of them have their key and value in the cache, or will have when the iteration that is
    planned has run (or, in a recomputation over several iterations, when those that share their blocks with it have run). `forced`: positions whose token
    the scenario dictated. `cumulative_logprob`: of its outputs, None where nothing counts them.
    `index`: the how-manieth of its group it is, from 0. vLLM's first release: Sequence.
    """

    __slots__ = ("cumulative_logprob", "forced", "group", "index", "num_computed_tokens", "num_preemptions", "num_prompt_tokens", "parent_id", "sequence_id",
                 "status", "token_ids")  # fmt: skip

    def __init__(self, group: SequenceGroup, index: int, parent: Sequence | None = None) -> None:
        """A sequence of its own with the group's prompt, or with `parent` one that has everything of it except its blocks."""
        self.group = group
        self.index = index
        self.sequence_id = group.sequence_id(index)
        self.num_prompt_tokens = len(group.spec.prompt_token_ids)
        self.parent_id = parent.sequence_id if parent is not None else None
        self.token_ids: list[int] = list(parent.token_ids if parent is not None else group.spec.prompt_token_ids)
        self.num_computed_tokens: int = parent.num_computed_tokens if parent is not None else 0
        self.status: SequenceStatus = parent.status if parent is not None else SequenceStatus.WAITING
        self.cumulative_logprob: float | None = parent.cumulative_logprob if parent is not None else None
        self.forced: list[int] = list(parent.forced) if parent is not None else []
        self.num_preemptions: int = parent.num_preemptions if parent is not None else 0

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Outputs so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the outputs so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are known but not in the cache: 1 while it decodes, more in a prompt phase or a recomputation."""
        return len(self.token_ids) - self.num_computed_tokens

    def append_token(self, token_id: int, *, forced: bool) -> None:
        """One more output."""
        if forced:
            self.forced.append(len(self.token_ids))
        self.token_ids.append(token_id)

    def __repr__(self) -> str:
        return f"Sequence({self.sequence_id}, {self.status.name}, {self.num_computed_tokens} of {len(self.token_ids)} tokens computed)"


class SequenceGroup:
    """A request: all its sequences.

    `sequences`: all that ever were, in order of birth. `living`: those that go on, in the order in which they are served: beams best first, others by birth.
    `arrival`: its place among all requests. `prefix`: the provider's sequence that its prompt begins with. `hypotheses`: finished beams, None without beam
    search. vLLM's first release: SequenceGroup.
    """

    def __init__(self, spec: PaperRequestSpec, arrival: int, prefix: Sequence | None = None) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.arrival = arrival
        self.prefix = prefix
        first = Sequence(self, 0)
        self.sequences: list[Sequence] = [first]
        self.living: list[Sequence] = [first]
        self.is_forked = spec.n == 1 or spec.beam_width is not None
        """Whether its samples exist: True from the start where there is nothing to fork, else from the end of the prompt phase."""
        self.hypotheses = Hypotheses[Sequence](spec.beam_width, spec.length_penalty) if spec.beam_width is not None else None

    @property
    def has_several(self) -> bool:
        """Whether its sequences are numbered."""
        return self.spec.n > 1 or self.spec.beam_width is not None

    def sequence_id(self, index: int) -> str:
        """The name of its sequence `index` (from 0)."""
        return f"{self.request_id}{index + 1}" if self.has_several else self.request_id

    @property
    def event_id(self) -> str:
        """The id under which events about the whole group are told: its only sequence's, or the request's once there are more."""
        return self.sequences[0].sequence_id if len(self.sequences) == 1 else self.request_id

    @property
    def max_num_running_seqs(self) -> int:
        """How many sequences it can have at one time from now on. vLLM 0.1.7: SequenceGroup.get_max_num_running_seqs."""
        if self.spec.beam_width is not None:
            return self.spec.beam_width
        return len(self.living) if self.is_forked else self.spec.n

    @property
    def num_prefix_tokens(self) -> int:
        """Length of the provider's prefix, 0 without one."""
        return self.prefix.num_prompt_tokens if self.prefix is not None else 0

    @property
    def is_finished(self) -> bool:
        """Whether none of its sequences goes on."""
        return not self.living

    def fork(self, parent: Sequence) -> Sequence:
        """A new sequence like `parent`, the last of `sequences`. The caller gives it blocks and a place in `living`."""
        child = Sequence(self, len(self.sequences), parent)
        self.sequences.append(child)
        return child

    def sampling_params(self, index: int) -> SamplingParams:
        """How sample `index` draws its tokens: seed + index, so that samples differ and each is reproducible."""
        spec = self.spec
        forced = spec.forced_token_ids[index] if index < len(spec.forced_token_ids) else ()
        return SamplingParams(
            max_tokens=max(spec.max_tokens, 1),
            temperature=spec.temperature,
            seed=spec.seed + index,
            stop_token_ids=spec.stop_token_ids,
            forced_token_ids=forced,
        )

    def results(self) -> list[Sequence]:
        """What the user gets: the `n` best finished beams, best first, or all samples."""
        if self.hypotheses is not None:
            return [sequence for _, sequence in self.hypotheses.entries[: self.spec.n]]
        return list(self.sequences)

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id}, living: {[s.sequence_id for s in self.living]})"
