"""What one operation of the block stack costs at pool sizes 1e3, 1e4 and 1e5: the numbers in a row must not grow.

    python -m tests.bench.bench_core

Nothing in the pool may depend on its size but building it: links live in the blocks, lookups are hash lookups (R1.4, R1.10).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.core.block_hash import BlockHasher
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.trace.events import Cause, CauseKind

POOL_SIZES = (1_000, 10_000, 100_000)
BLOCK_SIZE = 16
NUM_BLOCKS = 400
"""Blocks per measured call: the same in every pool, so that only the pool's size differs."""
REPEATS = 15


class Clock:
    """Collects the best time of several repeats, in nanoseconds of the processor: other programs shall not count."""

    def __init__(self) -> None:
        self.best = float("inf")

    @contextmanager
    def measure(self) -> Iterator[None]:
        begin = time.thread_time_ns()
        yield
        self.best = min(self.best, time.thread_time_ns() - begin)


def shuffled_pool(num_blocks: int, cached: bool) -> tuple[BlockPool, list[KVCacheBlock]]:
    """All blocks free, in random order of the queue (as after a long run), optionally all of them cached."""
    pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
    blocks = pool.get_new_blocks(num_blocks)
    if cached:
        for block in blocks:
            pool.insert_block_hash(block.block_id.to_bytes(36, "big"), block, BLOCK_SIZE)
    random.Random(0).shuffle(blocks)
    pool.free_blocks(blocks)
    return pool, blocks


def get_new_blocks(num_blocks: int) -> float:
    pool, _ = shuffled_pool(num_blocks, cached=False)
    clock = Clock()
    for _ in range(REPEATS):
        with clock.measure():
            taken = pool.get_new_blocks(NUM_BLOCKS)
        pool.free_blocks(taken)
    return clock.best / NUM_BLOCKS


def get_new_blocks_with_eviction(num_blocks: int) -> float:
    clock = Clock()
    for _ in range(5):
        pool, _ = shuffled_pool(num_blocks, cached=True)
        gc.collect()  # so that building the pool is not paid for here
        for block in pool.free_block_queue.peek_n(NUM_BLOCKS):  # read them once: the pool is measured, not the processor's caches
            assert block.block_hash is not None
            assert block.block_hash in pool.cached_block_hash_to_block
        with clock.measure():
            pool.get_new_blocks(NUM_BLOCKS)
    return clock.best / NUM_BLOCKS


def free_blocks(num_blocks: int) -> float:
    pool, _ = shuffled_pool(num_blocks, cached=False)
    clock = Clock()
    for _ in range(REPEATS):
        taken = pool.get_new_blocks(NUM_BLOCKS)
        with clock.measure():
            pool.free_blocks(taken)
    return clock.best / NUM_BLOCKS


def touch_in_the_middle(num_blocks: int) -> float:
    pool, blocks = shuffled_pool(num_blocks, cached=True)
    wanted = random.Random(1).sample(blocks, NUM_BLOCKS)
    clock = Clock()
    for _ in range(REPEATS):
        with clock.measure():
            pool.touch(wanted)
        pool.free_blocks(wanted)
    return clock.best / NUM_BLOCKS


def manager_with_cached_prompts(num_blocks: int) -> tuple[KVCacheManager, BlockHasher]:
    """A prompt of NUM_BLOCKS blocks is cached and free, the rest of the pool is full of other cached blocks."""
    hasher = BlockHasher(BLOCK_SIZE, "sha256_cbor")
    config = KVCacheConfig(num_blocks + 1, [KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE))])
    manager = KVCacheManager(config, num_blocks * BLOCK_SIZE)
    num_rest = num_blocks - NUM_BLOCKS
    rest = manager.block_pool.get_new_blocks(num_rest)
    for block in rest:
        manager.block_pool.insert_block_hash(block.block_id.to_bytes(36, "big"), block, BLOCK_SIZE)
    request = Request("first", range(NUM_BLOCKS * BLOCK_SIZE), block_hasher=hasher)
    manager.allocate_slots(request, request.num_tokens)
    manager.free(request)
    manager.block_pool.free_blocks(rest)
    return manager, hasher


def lookup(num_blocks: int) -> float:
    manager, hasher = manager_with_cached_prompts(num_blocks)
    request = Request("second", range(NUM_BLOCKS * BLOCK_SIZE + 1), block_hasher=hasher)
    clock = Clock()
    for _ in range(REPEATS):
        with clock.measure():
            hit = manager.get_computed_blocks(request)
        assert hit.num_tokens == NUM_BLOCKS * BLOCK_SIZE
    return clock.best / NUM_BLOCKS


def decode_step(num_blocks: int) -> float:
    """One schedule() and update_from_output() with one running request of about 300 blocks."""
    hasher = BlockHasher(BLOCK_SIZE, "sha256_cbor")
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=num_blocks * BLOCK_SIZE, max_num_batched_tokens=10_000),
        KVCacheConfig(num_blocks + 1, [KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE))]),
        block_hasher=hasher,
    )
    scheduler.add_request(Request("A", range(300 * BLOCK_SIZE), SamplingParams(max_tokens=5000)))
    answer = ModelRunnerOutput({"A": [SampledToken(7, Cause(CauseKind.GREEDY))]})
    scheduler.update_from_output(scheduler.schedule(), answer)
    clock = Clock()
    for _ in range(REPEATS):
        with clock.measure():
            for _ in range(BLOCK_SIZE * 4):
                scheduler.update_from_output(scheduler.schedule(), answer)
    return clock.best / (BLOCK_SIZE * 4)


OPERATIONS: dict[str, Callable[[int], float]] = {
    "get_new_blocks, per block": get_new_blocks,
    "get_new_blocks evicting, per block": get_new_blocks_with_eviction,
    "free_blocks, per block": free_blocks,
    "touch in mid-queue, per block": touch_in_the_middle,
    "lookup, per block hit": lookup,
    "decode step, one request": decode_step,
}


def main() -> None:
    gc.collect()
    gc.freeze()
    print(f"{'nanoseconds at pool size':<36}" + "".join(f"{size:>10,}" for size in POOL_SIZES) + f"{'growth':>10}")
    for name, operation in OPERATIONS.items():
        times = [operation(size) for size in POOL_SIZES]
        print(f"{name:<36}" + "".join(f"{value:>10.0f}" for value in times) + f"{times[-1] / times[0]:>10.2f}")


if __name__ == "__main__":
    main()
