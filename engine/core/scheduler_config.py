"""The scheduler's settings, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.errors import InvalidInput


class SchedulingPolicy(str, Enum):
    """Who is served first: in order of arrival, or by smallest `priority` and then arrival. vLLM: SchedulingPolicy."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True)
class SchedulerConfig:
    """`max_num_seqs`: requests running at once. `max_num_batched_tokens`: token budget of a step. `max_model_len`: tokens of one request, outputs included.
    `long_prefill_token_threshold`: most tokens of one request in a step, 0 for no bound. `scheduler_reserve_full_isl`: admit only if the whole current
    sequence fits (R7.4). `async_scheduling`: a step is planned while the one before it still runs (R7.7). `watermark`: share of the pool that an admission
    must leave free while others run.

    Raises InvalidInput for sizes that cannot work. vLLM: SchedulerConfig; here: `watermark` is checked by the KV-cache manager."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    policy: str = "fcfs"
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, but it must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise InvalidInput(f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, but it cannot be negative (0 means no bound)")
        if self.long_prefill_token_threshold > self.max_model_len:
            threshold = self.long_prefill_token_threshold
            raise InvalidInput(f"long_prefill_token_threshold is {threshold}, but no request is longer than max_model_len, which is {self.max_model_len}")
        if self.policy not in [policy.value for policy in SchedulingPolicy]:
            raise InvalidInput(f"unknown scheduling policy {self.policy!r}: choose one of {', '.join(policy.value for policy in SchedulingPolicy)}")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that can be scheduled without their steps being over: a full budget for every step on its way (R3.4)."""
        return self.max_num_batched_tokens * (2 if self.async_scheduling else 1)
