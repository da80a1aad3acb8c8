"""Block by block, why what lies behind a hit is no part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.block_hash import BlockHash
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.prefix_history import PrefixHistory, Registration
from engine.core.request import Request
from engine.trace.events import BlockStop, Cause, CauseKind

MAX_STOPS = 32
"""So many blocks are explained at most: behind the first few there is nothing new to say, and a long prompt has thousands."""


class BlockStops:
    """`hashes`: the request's, at the group's `block_size` (tokens). Reads the history, changes nothing."""

    def __init__(self, request: Request, hashes: Sequence[BlockHash], block_size: int, group_id: int, history: PrefixHistory) -> None:
        self._request = request
        self._hashes = hashes
        self._block_size = block_size
        self._group_id = group_id
        self._history = history

    def between(self, indices: range, cached_block: Callable[[int], KVCacheBlock | None], needs_parents: bool) -> list[BlockStop]:
        """One entry per block of `indices`, at most MAX_STOPS. `needs_parents`: whether a block is of use only behind an unbroken prefix."""
        stops: list[BlockStop] = []
        broken = False
        for index in indices[:MAX_STOPS]:
            block = cached_block(index)
            if block is None:
                cause = self._why_missing(index)
                broken = True
            elif broken and needs_parents:
                cause = Cause(CauseKind.PARENT_MISSING, {"logical_index": index})
            else:
                cause = Cause(CauseKind.NOT_USED, {"logical_index": index})
            stops.append(BlockStop(logical_index=index, cause=cause, block_id=None if block is None else block.block_id))
        return stops

    def _why_missing(self, index: int) -> Cause:
        num_tokens = (index + 1) * self._block_size
        block_hash = self._hashes[index].hex()
        eviction = self._history.eviction_of(self._group_id, block_hash)
        if eviction is not None:
            facts = {"logical_index": index, "num_tokens": num_tokens, "step": eviction.step, "for_request": eviction.for_request}
            return Cause(CauseKind.EVICTED_EARLIER, dict(facts))
        tokens = self._request.all_token_ids[num_tokens - self._block_size : num_tokens]
        best: Registration | None = None
        best_length = -1
        for other in self._history.siblings(self._group_id, self._hashes[index - 1].hex() if index else None):
            length = next((i for i, (a, b) in enumerate(zip(tokens, other.token_ids, strict=False)) if a != b), len(tokens))
            if length > best_length:
                best, best_length = other, length
        if best is None or (index == 0 and best_length == 0):
            return Cause(CauseKind.NOT_CACHED, {"logical_index": index, "num_tokens": num_tokens})
        if best_length >= min(len(tokens), len(best.token_ids)):
            if best.block_hash == block_hash:
                return Cause(CauseKind.NOT_CACHED, {"logical_index": index, "num_tokens": num_tokens})
            return Cause(CauseKind.EXTRA_KEYS_DIFFER, {"logical_index": index, "other_request": best.request_id})
        position = num_tokens - self._block_size + best_length
        facts = {
            "logical_index": index,
            "position": position,
            "token_id": tokens[best_length],
            "other_token_id": best.token_ids[best_length],
            "other_request": best.request_id,
        }
        return Cause(CauseKind.TOKEN_DIFFERS, dict(facts))
