"""The free queue: a doubly linked list threaded through the blocks themselves (R1.4).

Its head is allocated next. Cached blocks that nobody uses wait in it too, so *free* means *reclaimable* (S5). Because the links live in the
blocks, a block that is hit again leaves from the middle in O(1), whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_cache_block import KVCacheBlock


class FreeKVCacheBlockQueue:
    """Queue of reclaimable blocks, head first; two sentinels (id -1) spare every operation the empty case.

    Mutates the links of the blocks it is given. vLLM: FreeKVCacheBlockQueue.
    """

    __slots__ = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Link `blocks` in the given order."""
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(-1)
        self.fake_free_list_tail = KVCacheBlock(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the head. Raises ValueError when the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the `n` blocks at the head, in order. Raises ValueError, changing nothing, when there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError(f"cannot take {n} blocks from a free queue of {self.num_free_blocks}")
        if n <= 0:
            return []
        head = self.fake_free_list_head
        block = head.next_free_block
        taken: list[KVCacheBlock] = []
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        head.next_free_block = block
        block.prev_free_block = head
        self.num_free_blocks -= n
        return taken

    def peek_n(self, n: int) -> list[KVCacheBlock]:
        """The first `n` blocks (or all, if there are fewer), left where they are. vLLM: none; here: a recorder sees evictions before the pop."""
        peeked: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail and len(peeked) < n:
            peeked.append(block)
            block = block.next_free_block
        return peeked

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink `block` from wherever it stands, O(1). Raises RuntimeError when it is not in the queue."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put one block at the tail."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the tail: the last of them becomes the new tail. Nothing happens for none."""
        tail = self.fake_free_list_tail
        assert tail.prev_free_block is not None
        self._link(tail.prev_free_block, blocks, tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the head as a unit: the first of them becomes the new head. Nothing happens for none."""
        head = self.fake_free_list_head
        assert head.next_free_block is not None
        self._link(head, blocks, head.next_free_block)

    def _link(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock) -> None:
        """Put `blocks` between two neighbours."""
        for block in blocks:
            block.prev_free_block = before
            before.next_free_block = block
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks from head to tail: for showing and testing, O(n)."""
        return self.peek_n(self.num_free_blocks)
