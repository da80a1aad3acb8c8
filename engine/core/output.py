"""What the scheduler tells the worker, and what the worker answers.

Plain data, no torch: the only coupling between `engine.core` and `engine.worker`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import InvalidInput
from engine.trace.events import Cause


@dataclass(frozen=True)
class NewRequestData:
    """A request the worker sees for the first time: everything it needs. `block_ids`: full table per group. vLLM: NewRequestData."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    sampling_params: SamplingParams


@dataclass(frozen=True)
class CachedRequestData:
    """Requests the worker already knows, as parallel lists. `new_block_ids[i]`: ids to append per group, or the full table when
    `req_ids[i]` is in `resumed_req_ids`, or None when nothing was allocated. `all_token_ids`: for resumed requests, prompt and outputs so far.
    vLLM: CachedRequestData."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's plan. `num_scheduled_tokens` keeps the order of scheduling. vLLM: SchedulerOutput."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    kv_cache_block_copies: list[tuple[int, int]] = field(default_factory=list)
    new_block_ids_to_zero: list[int] | None = None


@dataclass(frozen=True)
class SampledToken:
    """One token and why it is this one (GREEDY, SEEDED or FORCED). Raises InvalidInput for a token that is not a non-negative int."""

    token_id: int
    cause: Cause

    def __post_init__(self) -> None:
        if type(self.token_id) is not int or self.token_id < 0:
            raise InvalidInput(f"a sampled token is {self.token_id!r}, but a token id is a whole number from 0 on: turn it into an int")


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What came out of the model: per request id the sampled tokens, empty while its prefill is not complete. vLLM: ModelRunnerOutput."""

    sampled: dict[str, list[SampledToken]]


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen. vLLM: SamplingParams; here: `forced_token_ids` are ours (the n-th output token is dictated).

    temperature 0 is greedy; otherwise `seed` makes the draw reproducible. Raises ValueError for a max_tokens below 1 or a negative temperature.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, but a request must produce at least 1 token")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, but it cannot be negative")
