"""The prefix cache itself: key -> the block or blocks that hold it (R1.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.core.block_hash import BlockHash, BlockHashWithGroupId
from engine.core.kv_cache_block import KVCacheBlock


class BlockHashToBlockMap:
    """Key -> one block, or a dict of blocks by id once a second one was registered under the same key.

    Equal blocks are never merged: block tables are append-only for the worker, so a duplicate stays where it is. vLLM: BlockHashToBlockMap.
    """

    __slots__ = ("_cache",)

    def __init__(self) -> None:
        self._cache: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The block of `key`, the first inserted if there are several, None if there is none."""
        blocks = self._cache.get(key)
        if type(blocks) is dict:
            return next(iter(blocks.values()))
        return blocks  # type: ignore[return-value]  # exact type test above: it is much the fastest here

    def finder(self, kv_cache_group_ids: Sequence[int]) -> Callable[[BlockHash], tuple[KVCacheBlock, ...] | None]:
        """A function that finds, for a block hash, the first inserted block in each of the groups, or None unless all have one. What does not depend on
        the hash is done here, once for a whole lookup. vLLM: BlockPool.get_cached_block."""
        get = self._cache.get
        suffixes = [group_id.to_bytes(4, "big") for group_id in kv_cache_group_ids]
        suffix = suffixes[0]

        def find_in_one(block_hash: BlockHash) -> tuple[KVCacheBlock, ...] | None:
            blocks = get(block_hash + suffix)
            if blocks is None:
                return None
            return (blocks,) if type(blocks) is KVCacheBlock else (next(iter(blocks.values())),)  # type: ignore[union-attr]  # see get_one_block

        def find_in_all(block_hash: BlockHash) -> tuple[KVCacheBlock, ...] | None:
            found: list[KVCacheBlock] = []
            for suffix in suffixes:
                blocks = get(block_hash + suffix)
                if blocks is None:
                    return None
                found.append(blocks if isinstance(blocks, KVCacheBlock) else next(iter(blocks.values())))
            return tuple(found)

        return find_in_one if len(suffixes) == 1 else find_in_all

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Register `block` under `key`, behind those that are there."""
        blocks = self._cache.get(key)
        if blocks is None:
            self._cache[key] = block
        elif isinstance(blocks, dict):
            blocks[block.block_id] = block
        else:
            self._cache[key] = {blocks.block_id: blocks, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Take one block away from `key`; None, changing nothing, if it is not there. A dict stays a dict until it is empty, and moves to the
        end of the map."""
        blocks = self._cache.pop(key, None)
        if blocks is None:
            return None
        if isinstance(blocks, KVCacheBlock):
            if blocks.block_id == block_id:
                return blocks
            self._cache[key] = blocks
            return None
        block = blocks.pop(block_id, None)
        if blocks:
            self._cache[key] = blocks
        return block

    def block_ids(self, key: BlockHashWithGroupId) -> list[int]:
        """Ids of all blocks of `key`, in order of insertion."""
        blocks = self._cache.get(key)
        if blocks is None:
            return []
        return list(blocks) if isinstance(blocks, dict) else [blocks.block_id]

    def has_several(self, key: BlockHashWithGroupId) -> bool:
        """Whether a second block was ever registered under `key` since it was last empty."""
        return isinstance(self._cache.get(key), dict)

    def items(self) -> Iterator[tuple[BlockHashWithGroupId, list[int]]]:
        """All keys with their block ids, in order of insertion."""
        return ((key, self.block_ids(key)) for key in self._cache)

    def newest_keys(self) -> Iterator[BlockHashWithGroupId]:
        """All keys, last inserted first. vLLM: none; here: a recorder reads only what is new."""
        return reversed(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: object) -> bool:
        return key in self._cache
