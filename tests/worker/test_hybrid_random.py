"""Many small hybrids with random layers, states, blocks, budgets and pools: every logit is that of transformers, every frame is sound."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from engine.core.kv_cache_spec import MambaSpec
from engine.trace.events import BlocksCopied, KVWritten, RequestPreempted, StateWritten
from engine.worker.kernel_settings import KernelSettings, choose_kernel_settings
from engine.worker.kv_cache import StateShape
from tests.worker.harness import TOLERANCE, TORCH, VOCAB_SIZE, untouched_copy
from tests.worker.hybrid_engine import HybridEngine, Size, groups_of, random_bamba, worst_difference

SEEDS = range(24)
LONGEST = 54
"""Tokens of the longest request."""
LAYERS = ("AM", "MA", "AMAMAM", "MAMA", "AMMAMM", "MMA", "AAM", "MAAMA")


def random_engine(seed: int) -> tuple[HybridEngine, random.Random]:
    """A model and settings. Heads are wide enough for a state to fit into a block of as many tokens as chosen, with one to spare or none."""
    chance = random.Random(seed)
    size = Size(
        layers=LAYERS[seed % len(LAYERS)],
        kv_heads=4,
        head_dim=8,
        d_state=chance.choice((1, 2)),
        d_conv=chance.choice((2, 3, 4)),
        n_groups=chance.choice((1, 2)),
        chunk_size=chance.choice((1, 2, 4, 16)),
    )
    mode = chance.choice(("align", "align", "all", "none"))
    block_size = chance.choice((4, 4, 5, 8))
    unit = chance.choice([u for u in range(1, block_size) if block_size % u == 0]) if mode == "align" and chance.random() < 0.6 else None
    attention = [layer for layer, kind in enumerate(size.layers) if kind == "A"]
    settings: KernelSettings = TORCH
    if seed % 4 == 0:
        settings = choose_kernel_settings("torch", attention[:1], num_layers=len(size.layers), attention_layers=attention)
    model = random_bamba(size, seed)
    specs = [group.kv_cache_spec for group in groups_of(model, block_size, mode)]
    for_one = sum(3 if isinstance(spec, MambaSpec) and mode != "all" else -(-LONGEST // block_size) for spec in specs)
    engine = HybridEngine(
        model,
        mode=mode,
        block_size=block_size,
        unit=unit,
        budget=chance.choice((3, 7, 16, 64)),
        num_blocks=int(for_one * chance.choice((1.1, 1.6, 4))) + 2,
        settings=settings,
        max_num_seqs=chance.choice((3, 5)),
    )
    return engine, chance


@cache
def life(seed: int) -> HybridEngine:
    """A few requests, some of which begin like others, one coming while the others run."""
    torch.set_num_threads(1)
    engine, chance = random_engine(seed)
    stock = [[chance.randrange(3, VOCAB_SIZE) for _ in range(60)] for _ in range(2)]
    for number in range(chance.randint(3, 5)):
        own = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(0, 6))]
        engine.add(f"R{number}", stock[chance.randrange(2)][: chance.randint(1, 30)] + own, chance.randint(1, 18))
        engine.run(chance.randint(0, 6))
    engine.run()
    return engine


@pytest.mark.parametrize("seed", SEEDS)
def test_random_lives_of_random_hybrids(seed: int) -> None:
    engine = life(seed)
    assert worst_difference(engine, untouched_copy(engine.runner.model)) <= TOLERANCE
    assert all(len(request.output_token_ids) == request.sampling_params.max_tokens for request in engine.requests.values())
    state_groups = {shape.group_id for shape in engine.runner.kv_cache.layers if isinstance(shape, StateShape)}
    assert {event.group_id for event in engine.of_kind(StateWritten)} == state_groups
    assert {event.group_id for event in engine.of_kind(KVWritten)} == {*range(len(engine.groups))} - state_groups


def test_the_random_lives_are_worth_something() -> None:
    """Together they have every order of layers, groups of states first and several of them, hits, copies for hits inside blocks, and preemptions."""
    engines = [life(seed) for seed in SEEDS]
    assert {len(engine.groups) for engine in engines} == {2, 3}
    assert any(isinstance(engine.runner.kv_cache.layers[0], StateShape) for engine in engines)
    assert sum(any(length for _, length in engine.hits()) for engine in engines) >= 6
    assert sum(bool(engine.of_kind(BlocksCopied)) for engine in engines) >= 4
    assert sum(bool(engine.of_kind(RequestPreempted)) for engine in engines) >= 2
    groups = [group.kv_cache_spec for engine in engines for group in engine.groups]
    assert {spec.mamba_cache_mode for spec in groups if isinstance(spec, MambaSpec)} == {"align", "all", "none"}
