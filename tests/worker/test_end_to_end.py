"""The real scheduler drives the real worker: a pool too small for everybody, prefix hits, chunks and preemptions, against transformers' DynamicCache."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from engine.core.output import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.trace.events import BlockEvicted, Event, PrefixLookup, RequestAdmitted, RequestPreempted
from engine.worker.kernel_settings import KernelSettings
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import INTERPRET, ONE_LAYER, TOLERANCE, TORCH, dynamic_cache_generation, dynamic_cache_logits, random_prompt


class Engine:
    """Scheduler and worker over one pool of `num_blocks` blocks, with every logits row kept by request and position."""

    def __init__(
        self, model: PreTrainedModel, *, block_size: int, num_blocks: int, max_num_batched_tokens: int, settings: KernelSettings = TORCH, poison: bool = True
    ) -> None:
        self.events: list[Event] = []
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.finished: dict[str, Request] = {}
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=8)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens, max_model_len=(num_blocks - 1) * block_size),
            KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=[KVCacheGroupSpec(layer_names=["layers"], kv_cache_spec=spec)]),
            block_hasher=BlockHasher(hash_block_size=block_size),
            emit=self.events.append,
        )
        self.runner = ModelRunner(
            model,
            num_blocks=num_blocks,
            block_sizes=(block_size,),
            max_num_seqs=4,
            max_model_len=(num_blocks - 1) * block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            kernel_settings=settings,
            emit=self.events.append,
        )
        if poison:
            for cache in (*self.runner.kv_cache.key_caches, *self.runner.kv_cache.value_caches):
                cache.fill_(float("nan"))

    def step(self) -> None:
        output = self.scheduler.schedule()
        result = self.runner.execute_model(output)
        tables = self.scheduler.kv_cache_manager.get_block_ids
        for row in self.runner.rows():  # R8.3: nothing is ever nulled with full attention, so rows and tables agree
            assert tuple(list(ids) for ids in row.block_ids) == tables(row.request_id)
        for req_id, logits in self.runner.last_logits.items():
            self.logits[req_id, self.scheduler.requests[req_id].num_computed_tokens - 1] = logits
        for request in self.scheduler.update_from_output(output, result):
            self.finished[request.request_id] = request

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("500 steps and no end")

    def assert_same_as_dynamic_cache(self, reference: PreTrainedModel) -> None:
        for req_id, request in self.finished.items():
            prompt, outputs = request.prompt_token_ids, request.output_token_ids
            assert outputs == dynamic_cache_generation(reference, prompt, request.sampling_params.max_tokens), req_id
            expected = dynamic_cache_logits(reference, request.all_token_ids, len(prompt))
            rows = {position: row for (r, position), row in self.logits.items() if r == req_id}
            assert rows.keys() >= set(range(len(prompt) - 1, request.num_tokens - 1))
            for position, row in rows.items():
                assert float((row - expected[position]).abs().max()) <= TOLERANCE, (req_id, position)

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(e, kind) for e in self.events)

    @property
    def num_hit_tokens(self) -> int:
        return sum(e.num_computed_tokens for e in self.events if isinstance(e, RequestAdmitted) and not e.resumed)


@pytest.mark.parametrize("settings", [TORCH, ONE_LAYER, INTERPRET], ids=["torch", "one layer", "interpret"])
def test_a_pool_that_is_too_small_preempts_and_still_says_the_same(model: PreTrainedModel, reference: PreTrainedModel, settings: KernelSettings) -> None:
    engine = Engine(model, block_size=4, num_blocks=13, max_num_batched_tokens=16, settings=settings)
    shared = random_prompt(9, seed=100)
    for req_id, prompt in {"A": shared, "B": random_prompt(13, seed=1), "C": [*shared[:8], 7, 8, 9], "D": random_prompt(6, seed=2)}.items():
        engine.scheduler.add_request(Request(req_id, prompt, SamplingParams(max_tokens=14)))
    engine.run()
    assert sorted(engine.finished) == ["A", "B", "C", "D"]
    assert engine.count(RequestPreempted) >= 2
    assert engine.count(BlockEvicted) >= 1
    assert engine.num_hit_tokens >= 8
    engine.assert_same_as_dynamic_cache(reference)


def test_a_hit_on_blocks_that_the_same_step_still_writes(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """S9: blocks are registered before the forward pass, so a twin that is admitted in the same step reads what that step writes."""
    engine = Engine(model, block_size=4, num_blocks=20, max_num_batched_tokens=64)
    prompt = random_prompt(11, seed=3)
    for req_id in ("A", "B"):
        engine.scheduler.add_request(Request(req_id, prompt, SamplingParams(max_tokens=5)))
    engine.step()
    lookups = [e.num_hit_tokens for e in engine.events if isinstance(e, PrefixLookup)]
    assert lookups == [0, 8]
    assert len(engine.runner.slot_mapping) == 11 + 3
    engine.run()
    engine.assert_same_as_dynamic_cache(reference)


@pytest.mark.parametrize("seed", range(6))
def test_random_crowds(model: PreTrainedModel, reference: PreTrainedModel, seed: int) -> None:
    """Block sizes, pool sizes, budgets, arrivals and shared prefixes at random, with NaN in every slot that was never written."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    prompts: list[list[int]] = []
    for i in range(7):
        prompt = random_prompt(rng.randint(1, 40), seed=1000 * seed + i)
        if prompts and rng.random() < 0.6:
            prompt = rng.choice(prompts)[: rng.randint(1, 40)] + prompt[: rng.randint(1, 8)]
        prompts.append(prompt[:44])
    max_tokens = [rng.randint(1, 16) for _ in prompts]
    longest = max(-(-(len(p) + m) // block_size) for p, m in zip(prompts, max_tokens, strict=True))
    engine = Engine(model, block_size=block_size, num_blocks=longest + rng.randint(2, longest + 2), max_num_batched_tokens=rng.choice([5, 16, 64]))
    waiting = [Request(str(i), p, SamplingParams(max_tokens=m)) for i, (p, m) in enumerate(zip(prompts, max_tokens, strict=True))]
    while waiting:
        engine.scheduler.add_request(waiting.pop(0))
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    assert len(engine.finished) == 7
    engine.assert_same_as_dynamic_cache(reference)


def test_every_block_is_free_and_every_row_empty_at_the_end(model: PreTrainedModel) -> None:
    engine = Engine(model, block_size=4, num_blocks=13, max_num_batched_tokens=16)
    for i in range(4):
        engine.scheduler.add_request(Request(str(i), random_prompt(9 + i, seed=i), SamplingParams(max_tokens=9)))
    engine.run()
    engine.step()
    assert engine.runner.rows() == ()
    assert engine.runner.requests == {}
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 12
