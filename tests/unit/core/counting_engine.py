"""A scheduler and a model that counts, for the scheduler's tests."""

from __future__ import annotations

from typing import Any

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.trace.events import (
    Cause,
    CauseKind,
    Event,
)

HASHER = BlockHasher(4, "sha256_cbor")


class Engine:
    """A scheduler and a model that counts: output tokens are 9001, 9002, ..."""

    def __init__(self, num_blocks: int, *, compat: str | None = None, enable_caching: bool = True, **settings: Any) -> None:
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_model_len": 64, **settings}),
            KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], FullAttentionSpec(4))]),
            enable_caching=enable_caching,
            block_hasher=HASHER,
            emit=self.events.append,
            compat=compat,
        )
        self.next_token = 9001

    def add(self, request_id: str, num_tokens: int, base: int = 0, max_tokens: int = 16, **options: Any) -> Request:
        stop = options.pop("stop", ())
        request = Request(request_id, range(base, base + num_tokens), SamplingParams(max_tokens=max_tokens, stop_token_ids=stop), **options)
        self.scheduler.add_request(request)
        return request

    def answer(self, output: SchedulerOutput, given: dict[str, list[int]] | None = None) -> list[Request]:
        sampled: dict[str, list[SampledToken]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if given and request_id in given:
                tokens = given[request_id]
            elif request.num_computed_tokens < request.num_tokens:
                tokens = []
            else:
                tokens = [self.next_token]
                self.next_token += 1
            sampled[request_id] = [SampledToken(token, Cause(CauseKind.GREEDY, {"probability": 1.0})) for token in tokens]
        return self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.answer(output)
        return output

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]
