"""Measures one side of the comparison with vLLM, in a process of its own.

    python tests/bench/block_stack.py ADAPTER.py NUM_REPEATS

prints JSON: the times of every row in seconds of the processor (so that neighbours disturb less), and a digest of what was decided, which must be the
same on both sides. Knows neither the engine nor vLLM, only the adapter, and uses nothing but the standard library.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
PROMPT_TOKENS = 10_000
DECODED_TOKENS = 2_000
CACHED_TOKENS = 9_984
WINDOW = 2_048
GROUPS: dict[str, list[dict[str, Any]]] = {
    "full": [{"type": "full"}],
    "window": [{"type": "swa", "window": WINDOW}],
    "full + window": [{"type": "full"}, {"type": "swa", "window": WINDOW}],
}


class Bench:
    """Collects times by row, and everything that was decided in one digest."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.times: dict[str, list[float]] = defaultdict(list)
        self.decisions = hashlib.sha256()

    @contextmanager
    def measure(self, row: str) -> Iterator[None]:
        gc.collect()
        begin = time.thread_time()
        yield
        self.times[row].append(time.thread_time() - begin)

    def decided(self, *values: object) -> None:
        self.decisions.update(repr(values).encode())

    # ------------------------------------------------------------------ rows
    def pool(self) -> None:
        """Build a pool, take all of it, give it back; n = NUM_BLOCKS."""
        n = NUM_BLOCKS
        with self.measure("make_pool(100,001)"):
            pool = self.adapter.make_pool(n + 1, BLOCK_SIZE, True)
        with self.measure("get_new_blocks(n)"):
            blocks = pool.get_new_blocks(n)
        self.decided([block.block_id for block in blocks])
        with self.measure("free_blocks, unhashed, one call"):
            pool.free_blocks(blocks)
        get = pool.get_new_blocks
        with self.measure("get_new_blocks(1) x n"):
            singles = [get(1) for _ in range(n)]
        self.decided([block.block_id for single in singles for block in single])
        free = pool.free_blocks
        with self.measure("free_blocks, unhashed, n calls"):
            for single in singles:
                free(single)
        self.decided([block.block_id for block in pool.get_new_blocks(n)])

    def cached_pool(self) -> None:
        """Cache all blocks, give them back, adopt them again, take them for something else."""
        n = NUM_BLOCKS
        pool = self.adapter.make_pool(n + 1, BLOCK_SIZE, True)
        blocks = pool.get_new_blocks(n)
        keys = [hashlib.sha256(str(index).encode()).digest() for index in range(n)]
        register = self.adapter.register
        with self.measure("register x n"):
            for block, key in zip(blocks, keys, strict=False):
                register(pool, block, key)
        with self.measure("free_blocks, hashed, reversed"):
            pool.free_blocks(reversed(blocks))
        shuffled = list(blocks)
        random.Random(0).shuffle(shuffled)
        with self.measure("touch, n free blocks"):
            pool.touch(shuffled)
        with self.measure("touch, n blocks in use"):
            pool.touch(shuffled)
        pool.free_blocks(shuffled)
        pool.free_blocks(reversed(blocks))
        with self.measure("get_new_blocks(n), evicting"):
            taken = pool.get_new_blocks(n)
        self.decided([block.block_id for block in taken], [block.block_hash for block in taken])

    def hashing(self) -> None:
        tokens = random.Random(1).choices(range(128_000), k=100_000)
        for block_size in (16, 4):
            with self.measure(f"hash_prompt, block size {block_size}"):
                hashes = self.adapter.hash_prompt(tokens, block_size)
            self.decided(len(hashes), [bytes(block_hash) for block_hash in hashes])

    def requests(self, name: str) -> None:
        """A prompt is computed, decodes, ends; a second one hits it."""
        adapter = self.adapter
        tokens = random.Random(2).choices(range(128_000), k=PROMPT_TOKENS)
        outputs = random.Random(3).choices(range(128_000), k=DECODED_TOKENS)
        manager = adapter.make_manager(4_000, BLOCK_SIZE, GROUPS[name], 32_768, True)
        adapter.next_step(manager)
        request = adapter.add_request(manager, "first", tokens)
        with self.measure(f"prefill, cold, {name}"):
            num_hit = adapter.prefill(manager, request, outputs[0])
        self.decided(num_hit)
        decode_step = adapter.decode_step
        with self.measure(f"decode_step x 2,000, {name}"):
            for token in outputs:
                decode_step(manager, request, token)
        with self.measure(f"finish, {name}"):
            adapter.finish(manager, request)
        adapter.next_step(manager)
        longer = adapter.add_request(manager, "longer", [*tokens, outputs[0], *outputs])
        self.decided(adapter.lookup(manager, longer))

        manager = adapter.make_manager(4_000, BLOCK_SIZE, GROUPS[name], 32_768, True)
        request = adapter.add_request(manager, "first", tokens)
        adapter.prefill(manager, request, 7)
        adapter.finish(manager, request)
        adapter.next_step(manager)
        again = adapter.add_request(manager, "again", tokens)
        lookup = adapter.lookup
        with self.measure(f"lookup x 5, {name}"):
            hits = [lookup(manager, again) for _ in range(5)]
        self.decided(hits)
        with self.measure(f"prefill, warm, {name}"):
            num_hit = adapter.prefill(manager, again, 7)
        if num_hit != CACHED_TOKENS:
            raise RuntimeError(f"{num_hit} tokens were hit instead of {CACHED_TOKENS}")
        adapter.finish(manager, again)


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("adapter", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    return adapter


def main() -> None:
    adapter_path, num_repeats = sys.argv[1], int(sys.argv[2])
    sys.path[0] = str(Path.cwd())
    bench = Bench(load(adapter_path))
    gc.collect()
    gc.freeze()
    digests = set()
    for _ in range(num_repeats):
        bench.decisions = hashlib.sha256()
        bench.pool()
        bench.cached_pool()
        bench.hashing()
        for name in GROUPS:
            bench.requests(name)
        digests.add(bench.decisions.hexdigest())
    print(json.dumps({"times": bench.times, "decisions": sorted(digests)}))


if __name__ == "__main__":
    main()
