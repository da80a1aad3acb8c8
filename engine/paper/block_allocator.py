"""Physical blocks of one kind of memory, the GPU's or the CPU's, and who is free (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.free_queue import FreeKVCacheBlockQueue
from engine.core.kv_cache_block import KVCacheBlock
from engine.errors import EngineError, InvalidInput


class BlockAllocator:
    """Blocks 0 to `num_blocks` - 1, all of them usable: there is no null block. Blocks are taken from the head of `free_block_queue` and come back to its head.

    Invariant: a block is queued if and only if its ref_cnt is 0. vLLM's first release: BlockAllocator; here: its list, a stack, is the queue that V1 has, used
    from one end only, and a fresh one hands out `free_queue_order` first, then the other blocks from 0 up.
    """

    def __init__(self, num_blocks: int, free_queue_order: Iterable[int] = ()) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.arrange_free_queue(free_queue_order)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody refers to. vLLM's first release: BlockAllocator.get_num_free_blocks."""
        return self.free_block_queue.num_free_blocks

    @property
    def free_block_ids(self) -> list[int]:
        """Ids in the free queue, head first."""
        return [block.block_id for block in self.free_block_queue.get_all_free_blocks()]

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` from the head, each with one reference. Raises EngineError, changing nothing, when there are fewer."""
        if num_blocks > self.num_free_blocks:
            raise EngineError(f"{num_blocks} blocks are wanted, but {self.num_free_blocks} are free: ask whether they fit before taking them")
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free(self, blocks: Iterable[KVCacheBlock]) -> tuple[list[int], list[int]]:
        """Take one reference from each of `blocks`, in this order; who has none left goes to the head of the queue, the last of them first.

        Returns the ids that are now at the head, in the order in which they stand there, and those that somebody still refers to. A block that is named twice
        loses two references. Raises EngineError, changing nothing more, for a block without references."""
        gone: list[KVCacheBlock] = []
        still_referenced: list[int] = []
        for block in blocks:
            if block.ref_cnt < 1:
                raise EngineError(f"block {block.block_id} is freed, but nobody refers to it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.prepend_n((block,))
                gone.append(block)
            else:
                still_referenced.append(block.block_id)
        gone_ids = [block.block_id for block in reversed(gone)]
        return gone_ids, [b for b in dict.fromkeys(still_referenced) if b not in gone_ids]

    def arrange_free_queue(self, order: Iterable[int]) -> None:
        """Put the free blocks `order` to the head, in this order; the others stay behind them as they are. Raises InvalidInput, changing nothing, unless each
        names a free block once. vLLM: none; here: for drawings whose block ids follow another order."""
        wanted = list(order)
        free = set(self.free_block_ids)
        if len(set(wanted)) != len(wanted) or not free.issuperset(wanted):
            raise InvalidInput(f"the free queue cannot begin with the blocks {wanted}: name each once, and only blocks that are free, which are {sorted(free)}")
        for block_id in wanted:
            self.free_block_queue.remove(self.blocks[block_id])
        self.free_block_queue.prepend_n([self.blocks[block_id] for block_id in wanted])
