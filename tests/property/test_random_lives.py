"""Many short lives of a scheduler with everything mixed: plain dice instead of a search, so that hundreds of them cost seconds and every mix comes up.

The same checks as in the machine of `test_group_mixes_machine`, which finds the smallest life once one goes wrong.
"""

from __future__ import annotations

from math import gcd
from random import Random
from typing import Any

import pytest

from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from engine.errors import InvalidInput
from tests.property.block_books import check_books
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import BLOCK_SIZES, KINDS, MAX_MODEL_LEN, Mix

NUM_LIVES = 1800
NUM_BATCHES = 6


def random_spec(dice: Random, kind: str, block_size: int) -> KVCacheSpec:
    if kind == "full":
        return FullAttentionSpec(block_size)
    if kind == "mla":
        return MLAAttentionSpec(block_size)
    if kind == "swa":
        return SlidingWindowSpec(block_size, sliding_window=dice.randint(1, 12))
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size, attention_chunk_size=dice.randint(1, 12))
    if kind == "rswa":
        return RSWASpec(block_size, rswa_window=dice.randint(1, 8))
    if kind == "sink":
        return SinkFullAttentionSpec(block_size, sink_len=block_size * dice.randint(1, 2))
    return MambaSpec(MAX_MODEL_LEN if kind == "none" else block_size, mamba_cache_mode=kind, num_speculative_blocks=dice.choice([0, 0, 1, 2]))


def random_mix(dice: Random, enable_caching: bool) -> Mix:
    num_groups = dice.choice([1, 1, 1, 2, 2, 2, 3, 4])
    equal = dice.choice([None, None, *BLOCK_SIZES])
    kinds = [dice.choice(KINDS) for _ in range(num_groups)]
    if num_groups > 1 and dice.random() < 0.5:
        kinds[:2] = ["full", "align"]
    specs = [random_spec(dice, kind, equal or dice.choice(BLOCK_SIZES)) for kind in kinds]
    finest = gcd(*(spec.block_size for spec in specs))
    hash_block_size = dice.choice([None, *(size for size in (1, 2, 4, 8) if finest % size == 0)]) if num_groups > 1 else None
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec, dice.random() < 0.2) for index, spec in enumerate(specs)]
    retains = enable_caching and any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs)
    return Mix(groups, hash_block_size, dice.random() < 0.2, dice.choice([None, None, 0, 320]) if retains else None)


def random_engine(dice: Random) -> DrivenScheduler:
    """Raises InvalidInput for mixes that do not exist."""
    enable_caching = dice.random() < 0.85
    mix = random_mix(dice, enable_caching)
    settings: dict[str, Any] = {
        "async_scheduling": dice.random() < 0.5,
        "max_num_seqs": dice.randint(1, 4),
        "max_num_batched_tokens": dice.choice([1, 3, 4, 8, 9, 16, 64]),
        "long_prefill_token_threshold": dice.choice([0, 0, 3]),
        "scheduler_reserve_full_isl": dice.random() < 0.5,
        "watermark": dice.choice([0.0, 0.0, 0.2]),
        "policy": dice.choice(["fcfs", "priority"]),
    }
    return DrivenScheduler(mix, 1 + mix.num_for_one_token + dice.randint(0, 20), enable_caching=enable_caching, **settings)


def arrive(dice: Random, engine: DrivenScheduler) -> None:
    prompt = [*([0] * dice.randint(0, 16)), *(dice.randint(0, 1) for _ in range(dice.randint(1, 10)))][:24]
    outputs = [dice.choice([0, 0, 1, 1, 1, 3]) for _ in range(dice.randint(1, 9))]
    request = engine.make(prompt, outputs, priority=dice.randint(0, 2), salt=dice.choice([None, None, None, "s"]))
    try:
        engine.add(request)
    except InvalidInput:
        assert request.request_id not in engine.scheduler.requests


def one_thing(dice: Random, engine: DrivenScheduler) -> None:
    what = dice.choice(["arrive", "plan", "plan", "hear", "hear", "arrive", "plan", "hear", "rare"])
    scheduler = engine.scheduler
    if what == "arrive":
        arrive(dice, engine)
    elif what == "plan" and scheduler.has_unfinished_requests() and len(engine.in_flight) < engine.max_in_flight:
        engine.schedule()
    elif what == "hear" and engine.in_flight:
        engine.update()
    elif what == "rare":
        rare = dice.choice(["abort", "reset", "evict", "evict"])
        if rare == "abort" and scheduler.requests:
            engine.abort(dice.choice(sorted(scheduler.requests)))
        elif rare == "reset":
            scheduler.reset_prefix_cache(dice.random() < 0.3)
        elif rare == "evict":
            engine.manager.evict_blocks({dice.randint(1, len(engine.manager.block_pool.blocks) - 1)})


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_no_life_goes_wrong(batch: int) -> None:
    num_lived = 0
    for seed in range(batch, NUM_LIVES, NUM_BATCHES):
        dice = Random(seed)
        try:
            engine = random_engine(dice)
        except InvalidInput:
            continue
        num_lived += 1
        for _ in range(dice.choice([20, 40])):
            one_thing(dice, engine)
            check_books(engine.manager)
        while (stuck := engine.run_to_end()) is not None:  # see the machine: only what was preempted far along, and gives blocks back on its way
            assert engine.requests[stuck].num_preemptions > 0, f"life {seed}"
            engine.abort(stuck)
        assert engine.manager.block_pool.get_num_free_blocks() == engine.num_unused
    assert num_lived > NUM_LIVES / NUM_BATCHES / 2
