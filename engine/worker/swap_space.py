"""The swap space of the paper's engine (section 4.5): a second KV cache in CPU memory, to which the pages of preempted sequence groups go and come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import EngineError
from engine.worker.kv_cache import KVCache


class SwapSpace:
    """`num_cpu_blocks` pages per layer beside `kv_cache`, with ids of their own from 0 on; none at all for 0.

    The copies are torch's own (index_select and index_copy_) and no kernel's, so no witness watches them; what the attention kernel reads after a swap is
    watched like any other step.

    Raises InvalidInput when the memory cannot be had. vLLM's first release: CacheEngine.cpu_cache, swap_out, swap_in.
    """

    def __init__(self, kv_cache: KVCache, num_cpu_blocks: int) -> None:
        self.num_cpu_blocks = num_cpu_blocks
        self.kv_cache = kv_cache
        self.cpu_cache = (
            KVCache(num_blocks=num_cpu_blocks, block_sizes=kv_cache.block_sizes, layers=kv_cache.layers, dtype=kv_cache.key_caches[0].dtype)
            if num_cpu_blocks
            else None
        )

    def swap_out(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages of all layers, (block of the pool, block of the swap space). All pages are read before one is written.

        Raises EngineError, before anything is written, for a block that does not exist or a destination that is named twice.
        """
        self._copy(self.kv_cache, self.cpu_cache, block_pairs)

    def swap_in(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """The way back: (block of the swap space, block of the pool). As `swap_out`."""
        self._copy(self.cpu_cache, self.kv_cache, block_pairs)

    def _copy(self, source: KVCache | None, destination: KVCache | None, block_pairs: Sequence[tuple[int, int]]) -> None:
        if not block_pairs:
            return
        if source is None or destination is None:
            raise EngineError("Blocks are to be swapped, but there is no swap space; give num_cpu_blocks of 1 or more.")
        self._check([s for s, _ in block_pairs], source)
        self._check([d for _, d in block_pairs], destination)
        if len({d for _, d in block_pairs}) != len(block_pairs):
            raise EngineError(f"Blocks are to be swapped by the pairs {list(block_pairs)}, but two pages cannot go to one block; name each destination once.")
        for read, written in ((source.key_caches, destination.key_caches), (source.value_caches, destination.value_caches)):
            sources = torch.tensor([s for s, _ in block_pairs], dtype=torch.int64, device=read[0].device)
            destinations = torch.tensor([d for _, d in block_pairs], dtype=torch.int64, device=written[0].device)
            for from_cache, to_cache in zip(read, written, strict=True):
                to_cache.index_copy_(0, destinations, from_cache.index_select(0, sources).to(to_cache.device))

    def _check(self, block_ids: list[int], cache: KVCache) -> None:
        where = "pool" if cache is self.kv_cache else "swap space"
        for block_id in block_ids:
            if not 0 <= block_id < cache.num_blocks:
                raise EngineError(f"Block {block_id} of the {where} is to be swapped, but its blocks are 0 to {cache.num_blocks - 1}; check the plan.")
