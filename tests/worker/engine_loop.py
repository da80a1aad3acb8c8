"""The real scheduler drives the real worker, without a session: what the worker's whole runs build on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from engine.core.output import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.model_groups import layer_groups_of
from engine.trace.events import Event
from engine.worker.kernel_settings import KernelSettings
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import TOLERANCE, TORCH

E = TypeVar("E", bound=Event)


class EngineLoop:
    """Scheduler and worker over one pool in which every page is not-a-number until it is written.

    `groups` name the model's layers. `budget`: tokens of a step. `logits[request]` lists (position of the fed token, float32 [vocab]), step after step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: list[KVCacheGroupSpec],
        *,
        num_blocks: int,
        budget: int,
        max_model_len: int,
        max_num_seqs: int = 4,
        caching: bool = True,
        settings: KernelSettings = TORCH,
        kernel_witness: bool = False,
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        block_size: int | None = None,
    ) -> None:
        specs = [group.kv_cache_spec for group in groups]
        self.groups = groups
        self.caching = caching
        self.events: list[Event] = []
        self.logits: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len),
            KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups),
            enable_caching=caching,
            block_hasher=BlockHasher(hash_block_size=hash_block_size or specs[0].block_size),
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            block_size=block_size,
            emit=self.emit,
        )
        self.runner = ModelRunner(
            model,
            num_blocks=num_blocks,
            block_sizes=tuple(spec.block_size for spec in specs),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            kernel_settings=settings,
            emit=self.emit,
            layer_groups=layer_groups_of(groups),
            sliding_windows=[spec.event_sliding_window for spec in specs],
            mamba_cache_modes=[spec.mamba_cache_mode if isinstance(spec, MambaSpec) else None for spec in specs],
            kernel_witness=kernel_witness,
        )
        self.spoil(range(num_blocks))

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Make the pages not-a-number, in all layers."""
        ids = list(block_ids)
        for layer in self.runner.kv_cache.one_layer_of:
            self.runner.kv_cache.key_caches[layer][ids] = torch.nan
            self.runner.kv_cache.value_caches[layer][ids] = torch.nan

    def emit(self, event: Event) -> None:
        """What scheduler and worker call for each event."""
        self.events.append(event)

    def begin_op(self, op: str) -> None:
        """An operation begins; with “schedule” a step does. For who records."""

    def check_executed(self) -> None:
        """Called in each step when the worker has run and the scheduler has not heard of it yet."""

    def add(self, req_id: str, prompt: list[int], num_tokens: int) -> None:
        self.begin_op(f"add_request {req_id}")
        self.requests[req_id] = Request(req_id, prompt, SamplingParams(max_tokens=num_tokens))
        self.scheduler.add_request(self.requests[req_id])

    def step(self) -> None:
        self.begin_op("schedule")
        output = self.scheduler.schedule()
        self.begin_op("execute_model")
        result = self.runner.execute_model(output)
        self.check_executed()
        for req_id, logits in self.runner.last_logits.items():
            self.logits.setdefault(req_id, []).append((self.requests[req_id].num_computed_tokens - 1, logits))
        self.begin_op("update_from_output")
        for request in self.scheduler.update_from_output(output, result):
            self.finished[request.request_id] = request

    def run(self, num_steps: int | None = None) -> None:
        """So many steps, or as many as it takes until all requests are finished."""
        for _ in range(1000 if num_steps is None else num_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        assert num_steps is not None, "1000 steps and no end"

    def of_kind(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def tables(self, req_id: str) -> tuple[list[int], ...]:
        return self.scheduler.kv_cache_manager.get_block_ids(req_id)

    def assert_says(self, expected: Callable[[Request], tuple[list[int], torch.Tensor | Mapping[int, torch.Tensor]]]) -> None:
        """Every finished request said the tokens that `expected` gives for it, and every row of logits is the one that it gives for the row's position."""
        for req_id, request in self.finished.items():
            said, logits = expected(request)
            assert request.output_token_ids == said, req_id
            rows = self.logits[req_id]
            assert {position for position, _ in rows} >= set(range(request.num_prompt_tokens - 1, request.num_tokens - 1)), req_id
            for position, row in rows:
                difference = float((row - logits[position]).abs().max())
                assert difference <= TOLERANCE, (req_id, position, difference)  # false for not-a-number, too
