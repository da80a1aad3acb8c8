"""The block pool: every physical block, the free queue and the prefix cache (section 1 of the rules).

Policy lives in two places only: blocks are taken from the head of the free queue (R1.5), and a block that nobody uses any more goes to the head
if it holds nothing that could be hit, to the tail if it does (R1.7). Everything that is called least-recently-used follows from these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.core.block_hash import (
    BlockHashWithGroupId,
    format_key,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    hashes_at_block_size,
    make_block_hash_with_group_id,
)
from engine.core.block_hash_map import BlockHashToBlockMap
from engine.core.free_queue import FreeKVCacheBlockQueue
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import check_num_blocks
from engine.core.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.errors import EngineError
from engine.trace.events import BlockCached, BlockEvicted, Cause, CauseKind, Emit, PrefixCacheReset

if TYPE_CHECKING:
    from engine.core.request import Request


class FreedBlocks(NamedTuple):
    """Where free_blocks put what it was given, in order: at the head, at the tail, or nowhere because others hold it."""

    prepended: list[KVCacheBlock]
    appended: list[KVCacheBlock]
    still_referenced: list[KVCacheBlock]


class BlockPool:
    """`num_blocks` blocks, of which block 0 becomes the null block (R1.1).

    `hash_block_size` (tokens per request hash) is needed where blocks are cached, i.e. with `enable_caching`. With `strict` a double free raises
    EngineError and changes nothing. Raises InvalidInput for `num_blocks` below 2.
    vLLM: BlockPool; here: `strict` (vLLM counts below zero in silence, S25), and free_blocks tells where the blocks went.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool = True,
        hash_block_size: int | None = None,
        *,
        enable_kv_cache_events: bool = False,
        emit: Emit | None = None,
        strict: bool = True,
    ) -> None:
        check_num_blocks(num_blocks)
        self.num_gpu_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.strict = strict
        self.blocks: list[KVCacheBlock] = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block: dict[int, set[BlockHashWithGroupId]] = {}
        """Keys beyond the primary one, by block id; only entries that end inside a block make them (R1.12)."""
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
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
            if block.block_hash is not None:
                self._evict_cached_block(block)
            assert block.ref_cnt == 0, f"block {block.block_id} was free with ref_cnt {block.ref_cnt}"
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adopt cached blocks: ref_cnt + 1 each; those that nobody used leave the free queue (R1.6)."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    # ------------------------------------------------------------------ giving back
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> FreedBlocks:
        """Drop one reference per entry, in the given order. Of the blocks that reach zero, those without a hash go to the head of the queue as a
        unit, the others to the tail; with caching off all go to the tail (R1.7).

        Raises EngineError, changing nothing, for a block that has no reference left (not when `strict` is off).
        """
        prepended: list[KVCacheBlock] = []
        appended: list[KVCacheBlock] = []
        still_referenced: list[KVCacheBlock] = []
        enable_caching = self.enable_caching
        for block in ordered_blocks:
            block.ref_cnt -= 1
            ref_cnt = block.ref_cnt
            if ref_cnt > 0:
                still_referenced.append(block)
            elif block.is_null:
                continue
            elif ref_cnt == 0:
                if enable_caching and block.block_hash is None:
                    prepended.append(block)
                else:
                    appended.append(block)
            elif self.strict:
                for undone in (*prepended, *appended, *still_referenced, block):
                    undone.ref_cnt += 1
                raise EngineError(f"block {block.block_id} is freed twice: nothing refers to it any more, so every reference must be given back once only")
        if prepended:
            self.free_block_queue.prepend_n(prepended)
        if appended:
            self.free_block_queue.append_n(appended)
        return FreedBlocks(prepended, appended, still_referenced)

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
            extra = self.cached_block_hashes_by_block.setdefault(block.block_id, set())
            if key == block.block_hash or key in extra:
                return
            extra.add(key)
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
    ) -> None:
        """Register blocks [num_cached_blocks, num_full_blocks) of the request's table `blocks` (R1.11), except null blocks and those whose entry in
        `block_mask` (one per block of that range) is False. One BlockStored is queued for the whole range."""
        if num_cached_blocks >= num_full_blocks:
            return
        assert self.hash_block_size is not None, "a pool that caches needs hash_block_size"
        hashes = hashes_at_block_size(request.block_hashes, self.hash_block_size, block_size)
        stored: list[bytes] = []
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            if block.is_null or (block_mask is not None and not block_mask[index - num_cached_blocks]):
                continue
            block_hash = hashes[index]
            num_tokens = (index + 1) * block_size
            if block.block_hash is not None:
                assert (block.block_hash_num_tokens or 0) < num_tokens, f"block {block.block_id} is cached already"
                self._evict_cached_block(block)
            key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
            duplicates = self.cached_block_hash_to_block.block_ids(key) if self._emit is not None else []
            self.insert_block_hash(key, block, num_tokens)
            stored.append(block_hash)
            if self._emit is not None:
                self._emit(
                    BlockCached(
                        cause=Cause(CauseKind.BLOCK_FULL, {"logical_index": index, "num_tokens": num_tokens}),
                        request_id=request.request_id,
                        group_id=kv_cache_group_id,
                        block_id=block.block_id,
                        block_hash=block_hash.hex(),
                        parent_hash=hashes[index - 1].hex() if index else None,
                        token_ids=request.all_token_ids[num_tokens - block_size : num_tokens],
                        duplicates=duplicates,
                    )
                )
        if self.enable_kv_cache_events:
            positions = range(num_cached_blocks * block_size, num_full_blocks * block_size, block_size)
            self.kv_event_queue.append(
                BlockStored(
                    block_hashes=stored,
                    parent_block_hash=hashes[num_cached_blocks - 1] if num_cached_blocks else None,
                    token_ids=request.all_token_ids[num_cached_blocks * block_size : num_full_blocks * block_size],
                    block_size=block_size,
                    lora_id=None,
                    medium=MEDIUM_GPU,
                    lora_name=request.lora_name,
                    extra_keys=[generate_block_hash_extra_keys(request, position) for position in positions],
                    group_idx=kv_cache_group_id,
                )
            )

    def evict_blocks(self, block_ids: Iterable[int], cause: Cause | None = None) -> None:
        """Drop the keys of these blocks; references and the queue stay as they are (R1.13). `cause` travels with the events."""
        cause = cause or Cause(CauseKind.SCENARIO, {"what": "evict"})
        for block_id in block_ids:
            self._evict_cached_block(self.blocks[block_id], cause)

    def reset_prefix_cache(self) -> bool:
        """Forget every key, if no block but the null block is in use; else return False and change nothing (R1.14)."""
        ok = self.get_num_free_blocks() == self.num_gpu_blocks - 1
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

    def _evict_cached_block(self, block: KVCacheBlock, cause: Cause | None = None) -> bool:
        """Take all keys of `block` out of the cache (R1.12), one BlockRemoved each; True if it had any. Without `cause` no trace event."""
        primary = block.block_hash
        if primary is None:
            return False
        extra = self.cached_block_hashes_by_block.pop(block.block_id, None)
        keys = [primary] if extra is None else [primary, *sorted(extra)]
        block.block_hash = None
        block.block_hash_num_tokens = None
        for key in keys:
            self.cached_block_hash_to_block.pop(key, block.block_id)
            if self.enable_kv_cache_events:
                self.kv_event_queue.append(BlockRemoved([get_block_hash(key)], MEDIUM_GPU, get_group_id(key)))
        if self._emit is not None and cause is not None:
            for key in keys:
                self._emit(BlockEvicted(cause=cause, group_id=get_group_id(key), block_id=block.block_id, block_hash=get_block_hash(key).hex()))
        return True

    # ------------------------------------------------------------------ questions
    def get_num_free_blocks(self) -> int:
        """Length of the free queue; cached blocks that nobody uses count as free (R1.15)."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Used share of the usable blocks, 0.0 to 1.0 (R1.15)."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def keys_of(self, block: KVCacheBlock) -> tuple[str, ...]:
        """All keys of `block` as frames show them, primary first. vLLM: none; here: for recorders."""
        if block.block_hash is None:
            return ()
        return tuple(format_key(key) for key in (block.block_hash, *sorted(self.cached_block_hashes_by_block.get(block.block_id, ()))))

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the queued KV events and forget them."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events
