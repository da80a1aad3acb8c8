"""The metadata of one physical KV-cache block (R1.3)."""

from __future__ import annotations


class KVCacheBlock:
    """One physical block: `block_size` token slots of every layer of its group, known here by id only.

    `ref_cnt` counts table entries and pins that name the block; the null block's is not maintained (R1.2). `block_hash` is the primary cache key
    (hash bytes and group id) or None, `block_hash_num_tokens` the length in tokens of the prefix which that key covers. `prev_free_block` and
    `next_free_block` are owned by the free queue and None while the block is not in it. vLLM: KVCacheBlock.
    """

    __slots__ = ("block_hash", "block_hash_num_tokens", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.block_hash_num_tokens: int | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = False

    def reset_hash(self) -> None:
        """Forget the primary key; the caller has taken it out of the map."""
        self.block_hash = None
        self.block_hash_num_tokens = None

    def __repr__(self) -> str:
        neighbours = tuple(b.block_id if b is not None else None for b in (self.prev_free_block, self.next_free_block))
        return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None}, links={neighbours})"
