"""The block pool: every physical block, the free queue and the prefix cache (section 1 of the rules).

Policy lives in two places only: blocks are taken from the head of the free queue (R1.5), and a block that nobody uses any more goes to the head
if it holds nothing that could be hit, to the tail if it does (R1.7). Everything that is called least-recently-used follows from these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from engine.core.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    format_key,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    hashes_at_block_size,
    make_block_hash_with_group_id,
)
from engine.core.block_hash_map import BlockHashToBlockMap
from engine.core.block_reports import report_cached, report_evicted
from engine.core.compat import check_compat
from engine.core.free_queue import FreeKVCacheBlockQueue
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import check_num_blocks
from engine.core.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.errors import EngineError
from engine.trace.events import Cause, CauseKind, Emit, PrefixCacheReset

if TYPE_CHECKING:
    from engine.core.request import Request


FreedBlocks: TypeAlias = tuple[list[KVCacheBlock], list[KVCacheBlock], list[KVCacheBlock]]
"""Where free_blocks put what it was given, in order: at the head, at the tail, or nowhere because others hold it."""


class BlockPool:
    """`num_blocks` blocks, of which block 0 becomes the null block (R1.1).

    `hash_block_size` (tokens per request hash) is needed where blocks are cached, i.e. with `enable_caching`. A double free raises EngineError and changes
    nothing, a key that gave way to a full block's stays away, and BlockRemoved is queued when the last block of a hash goes; with `compat` as in
    `engine.core.compat`. Raises InvalidInput for `num_blocks` below 2.
    vLLM: BlockPool; here: `compat`, and free_blocks tells where the blocks went.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        hash_block_size: int | None = None,
        *,
        enable_kv_cache_events: bool = False,
        emit: Emit | None = None,
        compat: str | None = None,
    ) -> None:
        check_num_blocks(num_blocks)
        self.num_gpu_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.compat = check_compat(compat)
        self.strict = compat is None
        self.blocks: list[KVCacheBlock] = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block: dict[int, set[BlockHashWithGroupId]] = {}
        """Keys beyond the primary one, by block id; only entries that end inside a block make them (R1.12)."""
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.num_permanent_blocks = 0
        """Blocks that somebody took for good (R1.16): in use, but no reason not to forget the prefix cache."""
        self.kv_event_queue: list[KVCacheEvent] = []
        self._emit = emit

    # ------------------------------------------------------------------ taking
    def get_new_blocks(self, num_blocks: int, for_request: str | None = None) -> list[KVCacheBlock]:
        """Take `num_blocks` blocks from the head of the free queue, ref_cnt 0 -> 1; cached ones lose all their keys first (R1.5).

        `for_request` only explains evictions. Raises ValueError, changing nothing, when fewer are free.
        """
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"cannot get {num_blocks} blocks from the pool: {self.free_block_queue.num_free_blocks} are free")
        if self._emit is not None and self.enable_caching:
            # Before the pop, so that whoever looks at the pool meanwhile finds every free block in the queue. Same result as evicting after it.
            for block in self.free_block_queue.peek_n(num_blocks):
                self._evict_cached_block(block, Cause(CauseKind.REALLOCATED, {"for_request": for_request}))
        taken = self.free_block_queue.popleft_n(num_blocks)
        for block in taken:
            if block.block_hash is not None and self.enable_caching:
                self._evict_cached_block(block)
            assert block.ref_cnt == 0, f"block {block.block_id} was free with ref_cnt {block.ref_cnt}"
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adopt cached blocks: ref_cnt + 1 each; those that nobody used leave the free queue (R1.6)."""
        queue = self.free_block_queue
        for block in blocks:
            ref_cnt = block.ref_cnt
            if not ref_cnt and not block.is_null:
                # What queue.remove does, written out: a call for each block would take as long again.
                before, after = block.prev_free_block, block.next_free_block
                if before is None or after is None:
                    raise RuntimeError(f"block {block.block_id} is not in the free queue")
                before.next_free_block = after
                after.prev_free_block = before
                block.prev_free_block = block.next_free_block = None
                queue.num_free_blocks -= 1
            block.ref_cnt = ref_cnt + 1

    # ------------------------------------------------------------------ giving back
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> FreedBlocks:
        """Drop one reference per entry, in the given order. Of the blocks that reach zero, those without a hash go to the head of the queue as a
        unit, the others to the tail; with caching off all go to the tail (R1.7).

        Raises EngineError, changing nothing, for a block that has no reference left (not in compat mode).
        """
        prepended: list[KVCacheBlock] = []
        appended: list[KVCacheBlock] = []
        still_referenced: list[KVCacheBlock] = []
        enable_caching = self.enable_caching
        null_block = self.null_block
        for block in ordered_blocks:
            ref_cnt = block.ref_cnt = block.ref_cnt - 1
            if block is null_block:
                continue
            if not ref_cnt:
                if enable_caching and block.block_hash is None:
                    prepended.append(block)
                else:
                    appended.append(block)
            elif ref_cnt > 0:
                still_referenced.append(block)
            elif self.strict:
                for undone in (*prepended, *appended, *still_referenced, block):
                    undone.ref_cnt += 1
                raise EngineError(f"block {block.block_id} is freed twice: nothing refers to it any more, so every reference must be given back once only")
        if prepended:
            self.free_block_queue.prepend_n(prepended)
        if appended:
            self.free_block_queue.append_n(appended)
        return prepended, appended, still_referenced

    # ------------------------------------------------------------------ the prefix cache
    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """The cached block of `block_hash` in each of the groups, or None unless all have one. Changes nothing."""
        get_one_block = self.cached_block_hash_to_block.get_one_block
        found: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            block = get_one_block(make_block_hash_with_group_id(block_hash, group_id))
            if block is None:
                return None
            found.append(block)
        return found

    def insert_block_hash(self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None) -> None:
        """Register `block` under `key`: its primary key if it has none, else a further one; nothing happens if it has this one (R1.12).

        `num_tokens`: length of the prefix that the key covers. vLLM: BlockPool._insert_block_hash.
        """
        if block.block_hash is None:
            block.block_hash = key
            block.block_hash_num_tokens = num_tokens
        else:
            if self.has_key(block, key):
                return
            self.cached_block_hashes_by_block.setdefault(block.block_id, set()).add(key)
        self.cached_block_hash_to_block.insert(key, block)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
        frontiers: dict[str, int] | None = None,
    ) -> None:
        """Register blocks [num_cached_blocks, num_full_blocks) of the request's table `blocks` (R1.11), except null blocks and those whose entry in
        `block_mask` (one per block of that range) is False. One BlockStored is queued for the whole range. Where events are reported, the request's entry in
        `frontiers` moves with the first of them.

        Raises EngineError, changing nothing, when the table or the request's hashes are shorter than that."""
        if num_cached_blocks >= num_full_blocks:
            return
        assert self.hash_block_size is not None, "a pool that caches needs hash_block_size"
        hashes = hashes_at_block_size(request.block_hashes, self.hash_block_size, block_size)
        is_short = num_full_blocks > len(blocks)
        if (is_short and (self.strict or block_mask is not None)) or (self.strict and num_full_blocks > len(hashes)):
            raise EngineError(
                f"{num_full_blocks} blocks of {request.request_id} cannot be cached: its table has {len(blocks)}, and {len(hashes)} of its blocks are full"
            )
        group_suffix = kv_cache_group_id.to_bytes(4, "big")
        emit = self._emit
        stored: list[int] = []
        for index in range(num_cached_blocks, min(num_full_blocks, len(blocks))):
            block = blocks[index]
            if block.is_null or (block_mask is not None and not block_mask[index - num_cached_blocks]):
                continue
            block_hash = hashes[index]
            num_tokens = (index + 1) * block_size
            if block.block_hash is not None:
                # Only an entry that ended inside the block can be here: it gives way to the full block's.
                if (block.block_hash_num_tokens or 0) >= num_tokens:
                    raise EngineError(f"block {block.block_id} of {request.request_id} is cached already")
                self._evict_cached_block(block, Cause(CauseKind.PROMOTED, {"logical_index": index, "num_tokens": num_tokens}) if emit is not None else None)
            key = block_hash + group_suffix
            duplicates = self.cached_block_hash_to_block.block_ids(key) if emit is not None else []
            self.insert_block_hash(key, block, num_tokens)
            stored.append(index)
            if emit is not None:
                if frontiers is not None:
                    frontiers[request.request_id] = num_full_blocks
                why = Cause(CauseKind.BLOCK_FULL, {"logical_index": index, "num_tokens": num_tokens})
                parent = hashes[index - 1] if index else None
                report_cached(emit, request, block, key, parent, range(num_tokens - block_size, num_tokens), duplicates, num_full_blocks, why)
        if self.enable_kv_cache_events:
            if is_short:
                raise EngineError(f"block {len(blocks)} of {request.request_id} cannot be cached: its table ends before it")  # compat: what comes before was
            self._queue_stored(
                request,
                [hashes[index] for index in stored],
                hashes[num_cached_blocks - 1] if num_cached_blocks else None,
                range(num_cached_blocks * block_size, num_full_blocks * block_size),
                block_size,
                kv_cache_group_id,
                [index * block_size for index in stored],
            )

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, kv_cache_group_id: int, block_size: int, num_cached_block: int | None = None
    ) -> BlockHashWithGroupId | None:
        """Make `block` reachable from the prefix of `num_tokens` tokens, which ends inside it (R6.3); returns the key, None for a null block.

        `num_tokens` is a multiple of the hash block size, not of `block_size`. An older entry that covers fewer tokens gives way; beside a longer one the
        key is a further one, without an event if the block had it. `num_cached_block` only travels with the trace event. vLLM: BlockPool.cache_partial_block;
        here: in default mode nothing is registered beside the full block's key (A49), and the event begins at the block's first token (A54)."""
        if block.is_null:
            return None
        size = self.hash_block_size
        assert size is not None
        if num_tokens % size or num_tokens % block_size == 0:
            raise EngineError(f"an entry of {num_tokens} tokens does not end inside a block of {block_size} at a multiple of {size}")
        index = num_tokens // size - 1
        block_hash = request.block_hashes[index]
        key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
        covered = block.block_hash_num_tokens
        if self.has_key(block, key):
            return key
        if self.strict and covered is not None and covered > num_tokens:
            return None
        emit = self._emit
        facts = {"logical_index": num_tokens // block_size, "num_tokens": num_tokens}
        if covered is not None and covered < num_tokens:
            self._evict_cached_block(block, Cause(CauseKind.PROMOTED, dict(facts)) if emit is not None else None)
        duplicates = self.cached_block_hash_to_block.block_ids(key) if emit is not None else []
        self.insert_block_hash(key, block, num_tokens)
        if emit is not None:
            parent = request.block_hashes[index - 1] if index else None
            why = Cause(CauseKind.PROMPT_BOUNDARY, dict(facts))
            report_cached(emit, request, block, key, parent, range(num_tokens - size, num_tokens), duplicates, num_cached_block, why)
        if self.enable_kv_cache_events:
            start = num_tokens // block_size * block_size if self.strict else index * size
            parent = request.block_hashes[start // size - 1] if start else None
            self._queue_stored(request, [block_hash], parent, range(start, num_tokens), num_tokens - start, kv_cache_group_id, [start])
        return key

    def move_block_hashes(self, source: KVCacheBlock, destination: KVCacheBlock) -> None:
        """Give all keys of `source` to `destination`, which has none: the cache moves, the block that is written stays (R6.5). No events."""
        assert destination.block_hash is None, f"block {destination.block_id} is cached already"
        num_tokens = source.block_hash_num_tokens
        for key in self._take_keys(source):
            self.insert_block_hash(key, destination, num_tokens)

    def _queue_stored(
        self,
        request: Request,
        block_hashes: list[BlockHash],
        parent: BlockHash | None,
        tokens: range,
        block_size: int,
        kv_cache_group_id: int,
        starts: list[int],
    ) -> None:
        """Queue one BlockStored (R9.1). `tokens`: the positions it covers; `starts`: first position of each stored block."""
        keys = [generate_block_hash_extra_keys(request, start, start + block_size, compat=self.compat) for start in starts]
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=block_hashes,
                parent_block_hash=parent,
                token_ids=request.all_token_ids[tokens.start : tokens.stop],
                block_size=block_size,
                lora_id=request.lora_int_id if request.lora_name else None,
                medium=MEDIUM_GPU,
                lora_name=request.lora_name,
                extra_keys=keys or None,
                group_idx=kv_cache_group_id,
            )
        )

    def evict_blocks(self, block_ids: Iterable[int], cause: Cause | None = None) -> None:
        """Drop the keys of these blocks; references and the queue stay as they are (R1.13). `cause` travels with the events."""
        cause = cause or Cause(CauseKind.SCENARIO, {"what": "evict"})
        for block_id in block_ids:
            self._evict_cached_block(self.blocks[block_id], cause)

    def reset_prefix_cache(self) -> bool:
        """Forget every key, if no block but the null block and those taken for good is in use; else return False and change nothing (R1.14)."""
        ok = self.get_num_free_blocks() == self.num_gpu_blocks - 1 - self.num_permanent_blocks
        if ok:
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            self.cached_block_hashes_by_block = {}
            for block in self.blocks:
                block.reset_hash()
            if self.enable_kv_cache_events:
                self.kv_event_queue.append(AllBlocksCleared())
        if self._emit is not None:
            self._emit(PrefixCacheReset(cause=Cause(CauseKind.SCENARIO, {"what": "reset"}), ok=ok))
        return ok

    def _take_keys(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """Take all keys of `block` out of the map, primary first, and return them (R1.12)."""
        primary = block.block_hash
        if primary is None:
            return []
        extra = self.cached_block_hashes_by_block.pop(block.block_id, None)
        keys = [primary] if extra is None else [primary, *sorted(extra)]
        block.block_hash = None
        block.block_hash_num_tokens = None
        for key in keys:
            self.cached_block_hash_to_block.pop(key, block.block_id)
        return keys

    def _evict_cached_block(self, block: KVCacheBlock, cause: Cause | None = None) -> bool:
        """Take all keys of `block` out of the cache, one BlockRemoved each; True if it had any. Without `cause` no trace event."""
        emit = self._emit if cause is not None else None
        further = self._evict_further_keys(block, emit, cause) if emit is not None and cause is not None else []
        keys = self._take_keys(block)
        if self.enable_kv_cache_events:
            for key in (*keys, *further):
                if not self.strict or key not in self.cached_block_hash_to_block:
                    self.kv_event_queue.append(BlockRemoved([get_block_hash(key)], MEDIUM_GPU, get_group_id(key)))
        if keys and emit is not None and cause is not None:
            report_evicted(emit, block, keys[0], cause)
        return bool(keys)

    def _evict_further_keys(self, block: KVCacheBlock, emit: Emit, cause: Cause) -> list[BlockHashWithGroupId]:
        """All but the primary key, one by one, so that each report finds the books as they are without it."""
        further = sorted(self.cached_block_hashes_by_block.get(block.block_id, ()))
        for number, key in enumerate(further, 1):
            self.cached_block_hashes_by_block[block.block_id] = set(further[number:])
            if number == len(further):
                del self.cached_block_hashes_by_block[block.block_id]
            self.cached_block_hash_to_block.pop(key, block.block_id)
            report_evicted(emit, block, key, cause)
        return further

    # ------------------------------------------------------------------ questions
    def get_num_free_blocks(self) -> int:
        """Length of the free queue; cached blocks that nobody uses count as free (R1.15)."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Used share of the usable blocks, 0.0 to 1.0 (R1.15)."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def has_key(self, block: KVCacheBlock, key: BlockHashWithGroupId) -> bool:
        """Whether `block` is registered under `key`. vLLM: BlockHashToBlockMap.contain."""
        return block.block_hash == key or key in self.cached_block_hashes_by_block.get(block.block_id, ())

    def keys_of(self, block: KVCacheBlock) -> tuple[str, ...]:
        """All keys of `block` as frames show them, primary first. vLLM: none; here: for recorders."""
        if block.block_hash is None:
            return ()
        return tuple(format_key(key) for key in (block.block_hash, *sorted(self.cached_block_hashes_by_block.get(block.block_id, ()))))

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the queued KV events and forget them."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events
