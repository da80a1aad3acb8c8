"""The paper's scheduler with the real worker: whatever is shared, swapped or computed again, every sequence goes on as if it were alone (sections 4.4, 4.5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from transformers import PreTrainedModel

from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.trace.events import BlocksCopied, BlocksSwappedIn, BlocksSwappedOut, RequestPreempted
from tests.worker.hand_made_groups import worst_difference
from tests.worker.harness import TOLERANCE, random_prompt
from tests.worker.paper_engine import PaperEngine

PREFIX = tuple(random_prompt(10, seed=50))
PLAIN = PaperRequestSpec("plain", tuple(random_prompt(9, seed=1)), max_tokens=14, temperature=0.8, seed=3)
SAMPLES = PaperRequestSpec("S", tuple(random_prompt(7, seed=2)), max_tokens=14, n=3, temperature=1.2, seed=7, arrival_step=2)
BEAMS = PaperRequestSpec("B", tuple(random_prompt(6, seed=3)), max_tokens=12, beam_width=4, n=4, arrival_step=3)
KEPT = PaperRequestSpec("P", PREFIX, max_tokens=0, is_prefix=True)
TASKS = [
    PaperRequestSpec(name, (*PREFIX, *random_prompt(length, seed=60 + length)), max_tokens=9, prefix_id="P", arrival_step=4, temperature=0.7, seed=length)
    for name, length in (("T", 3), ("U", 5))
]
EVERYBODY = (KEPT, PLAIN, SAMPLES, BEAMS, *TASKS)
ROOMY = PaperConfig(num_blocks=120, block_size=4, num_cpu_blocks=0, max_num_seqs=12)


def run(model: PreTrainedModel, reference: PreTrainedModel, config: PaperConfig, specs: tuple[PaperRequestSpec, ...]) -> PaperEngine:
    """To the end, with the logits of every iteration compared."""
    engine = PaperEngine(model, config)
    for plan in engine.run(*specs):
        assert worst_difference(engine.runner, plan, reference) <= TOLERANCE
    return engine


def outcome(engine: PaperEngine, name: str) -> list[tuple[list[int], float]]:
    """Samples by birth; beams best first with their scores."""
    if name == "B":
        return [(sequence.output_token_ids, score) for score, sequence in engine.hypotheses(name)]
    return [(tokens, 0.0) for tokens in engine.outputs(name)]


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, reference: PreTrainedModel) -> dict[str, list[tuple[list[int], float]]]:
    """Every request by itself in a pool with room for all; those with a prefix as plain requests with the whole prompt."""
    return {spec.request_id: outcome(run(model, reference, ROOMY, (replace(spec, prefix_id=None, arrival_step=1),)), spec.request_id) for spec in EVERYBODY[1:]}


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize(("num_blocks", "num_cpu_blocks", "block_size"), [(120, 0, 4), (26, 40, 4), (22, 40, 4), (26, 3, 4), (15, 20, 8), (84, 90, 1)])
def test_everybody_together_as_alone(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    alone: dict[str, list[tuple[list[int], float]]],
    mode: Literal["auto", "swap", "recompute"],
    num_blocks: int,
    num_cpu_blocks: int,
    block_size: int,
) -> None:
    """Samples, beams, a plain request and two with a provider's prefix, in pools that have room and in pools that have not: the same tokens and scores."""
    config = PaperConfig(
        num_blocks=num_blocks, block_size=block_size, num_cpu_blocks=num_cpu_blocks, max_num_seqs=12, max_num_batched_tokens=64, preemption_mode=mode
    )
    engine = run(model, reference, config, EVERYBODY)
    for spec in EVERYBODY[1:]:
        found, expected = outcome(engine, spec.request_id), alone[spec.request_id]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], spec.request_id
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=TOLERANCE)
    kinds = {type(event) for event in engine.events}
    assert block_size == 1 or BlocksCopied in kinds
    if num_blocks != 120:
        assert RequestPreempted in kinds
        assert (BlocksSwappedOut in kinds) == (BlocksSwappedIn in kinds)
        assert (BlocksSwappedOut in kinds) <= (mode != "recompute")
        if num_cpu_blocks > 20 and mode == "swap":
            assert BlocksSwappedOut in kinds
    manager = engine.scheduler.block_manager
    assert manager.gpu_allocator.num_free_blocks == num_blocks - -(-len(PREFIX) // block_size)  # the provider keeps its prefix
    assert manager.cpu_allocator.num_free_blocks == num_cpu_blocks


@pytest.mark.parametrize("name", ["S", "B", "T"])
def test_a_forgotten_copy_is_seen(model: PreTrainedModel, reference: PreTrainedModel, name: str) -> None:
    """The comparison can fail, for samples, for beams and behind a prefix."""
    specs = (KEPT, next(spec for spec in EVERYBODY if spec.request_id == name))
    engine = PaperEngine(model, ROOMY, forget_copies=True)
    for cache in (*engine.runner.kv_cache.key_caches, *engine.runner.kv_cache.value_caches):
        cache.zero_()  # otherwise beams would be chosen by not-a-number
    assert max(worst_difference(engine.runner, plan, reference) for plan in engine.run(*specs)) > 0.01
