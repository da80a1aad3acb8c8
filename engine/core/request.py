"""A request: its tokens, their hashes, and how far it has got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from engine.core.block_hash import BlockHash
from engine.core.extra_keys import MultiModalFeature, check_mm_features, check_prompt_embeds
from engine.core.output import SamplingParams
from engine.errors import EngineError, InvalidInput


class RequestStatus(IntEnum):
    """vLLM's names; everything behind PREEMPTED is an end. vLLM: RequestStatus."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self > RequestStatus.PREEMPTED


FINISH_REASONS: dict[RequestStatus, str] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """Prompt and output tokens of one request, the hashes of its full blocks and its progress.

    Hashes the full blocks of the prompt at once and further ones as outputs complete them (R2.5); without `block_hasher` there are none.
    `arrival_time` orders requests, any unit. A smaller `priority` is served first. `mm_features` say which prompt tokens are placeholders of which item;
    `prompt_embeds` has one row of raw little-endian floats per prompt token. Raises InvalidInput for an empty prompt, a token that is not a
    non-negative int, and items or rows that do not fit the prompt.
    vLLM: Request; here: rows of bytes instead of a tensor, beside token ids that are given (vLLM takes zeros for them).
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hasher",
        "block_hashes",
        "cache_salt",
        "drop_stale_output",
        "is_freed",
        "is_prefill_chunk",
        "lora_int_id",
        "lora_name",
        "mm_features",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_output_tokens",
        "priority",
        "prompt_embeds",
        "request_id",
        "sampling_params",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        lora_int_id: int = 1,
        mm_features: Sequence[MultiModalFeature] = (),
        prompt_embeds: Sequence[bytes] | None = None,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        check_prompt(request_id, prompt_token_ids)
        self.request_id = request_id
        self.sampling_params = sampling_params or SamplingParams()
        self.all_token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        if mm_features:
            check_mm_features(request_id, mm_features, self.num_prompt_tokens)
        if prompt_embeds is not None:
            check_prompt_embeds(request_id, prompt_embeds, self.num_prompt_tokens)
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.lora_int_id = lora_int_id
        self.mm_features = tuple(mm_features)
        self.prompt_embeds = prompt_embeds
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        """Tokens scheduled, but their step is not over."""
        self.num_output_placeholders = 0
        """Asynchronous scheduling: tokens that running steps will sample (R7.7)."""
        self.num_stale_output_tokens = 0
        """Of the tokens in flight, those that were scheduled before a preemption; `drop_stale_output`: what they sample is lost."""
        self.drop_stale_output = False
        self.is_prefill_chunk = False
        """Whether the last schedule left part of the prompt for later."""
        self.shared_prefix_boundary = 0
        """The junction that the last lookup found (R4.5)."""
        self.num_preemptions = 0
        self.is_freed = False
        """Whether the request is over and its blocks were given back."""
        self.block_hashes: list[BlockHash] = []
        self.block_hasher = block_hasher
        self._update_block_hashes()

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append sampled tokens and hash the blocks that they complete. Their keys and values are not computed yet.

        Raises InvalidInput, changing nothing, for a token that is not a non-negative int."""
        if type(token_ids) is int and token_ids >= 0:
            self.all_token_ids.append(token_ids)
        else:
            many: list[int] = list(token_ids) if hasattr(token_ids, "__iter__") else [token_ids]
            check_token_ids(self.request_id, many, "outputs")
            self.all_token_ids.extend(many)
        if self.block_hasher is not None:
            self.block_hashes += self.block_hasher(self)

    def set_block_hasher(self, block_hasher: Callable[[Request], list[BlockHash]]) -> None:
        """Hash what is full and go on hashing with `block_hasher`."""
        self.block_hasher = block_hasher
        self._update_block_hashes()

    def _update_block_hashes(self) -> None:
        if self.block_hasher is not None:
            self.block_hashes.extend(self.block_hasher(self))

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Outputs so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the outputs so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def max_tokens(self) -> int:
        """How many outputs it may have."""
        return self.sampling_params.max_tokens

    def is_finished(self) -> bool:
        """Whether it is over."""
        return self.status.is_finished

    def ends_with_running_steps(self) -> bool:
        """Asynchronous scheduling: whether the steps on their way already bring the last token that the request may have, so that it needs no further one."""
        num_placeholders = self.num_output_placeholders
        return num_placeholders > 0 and self.num_computed_tokens + 2 - num_placeholders >= self.num_prompt_tokens + self.max_tokens

    def step_is_over(self, num_scheduled_tokens: int) -> bool:
        """A step that computed so many of the request's tokens has ended; whether it was planned before a preemption, so that what it sampled is stale.
        Raises EngineError when more tokens come back than were on their way."""
        self.num_in_flight_tokens -= num_scheduled_tokens
        is_stale = self.num_stale_output_tokens > 0
        if is_stale:
            self.num_stale_output_tokens -= num_scheduled_tokens
            if self.num_stale_output_tokens < 0:
                raise EngineError(f"request {self.request_id} was given the output of more tokens than were on their way")
        return is_stale

    def get_finished_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error``; None while it is not over."""
        return FINISH_REASONS.get(self.status)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens computed)"


def check_prompt(request_id: str, prompt_token_ids: Sequence[int]) -> None:
    """Raises InvalidInput for an empty prompt and for the first token that is not a non-negative int."""
    if not prompt_token_ids:
        raise InvalidInput(f"request {request_id!r} has an empty prompt: give it at least 1 token")
    check_token_ids(request_id, prompt_token_ids, "prompt")


def check_token_ids(request_id: str, token_ids: Sequence[int], which: str) -> None:
    """Raises InvalidInput for the first token that is not a non-negative int; the sentence says at which position of the request's `which`."""
    if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
        return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise InvalidInput(f"request {request_id!r} has {token_id!r} at position {position} of its {which}, but a token id is a whole number")
        if token_id < 0:
            raise InvalidInput(f"request {request_id!r} has token {token_id} at position {position} of its {which}, but token ids begin at 0")
