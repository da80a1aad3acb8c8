"""The block pool (section 1): both ends of the queue, the prefix cache, what it refuses, and what it reports."""

from __future__ import annotations

import pytest

from engine.core.block_hash import BlockHasher, make_block_hash_with_group_id
from engine.core.block_pool import BlockPool
from engine.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.core.request import Request
from engine.errors import EngineError, InvalidInput
from engine.trace.events import BlockCached, BlockEvicted, CauseKind, Event


def queue(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def free(pool: BlockPool, *block_ids: int) -> None:
    pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])


def register(pool: BlockPool, block_id: int, label: bytes) -> bytes:
    key = make_block_hash_with_group_id(label, 0)
    pool.insert_block_hash(key, pool.blocks[block_id], 4)
    return key


def test_block_0_is_the_null_block_and_1_comes_first() -> None:
    """R1.1."""
    pool = BlockPool(5, True, 4)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert queue(pool) == [1, 2, 3, 4]
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 1, 1, 0]


def test_freeing_prepends_unhashed_and_appends_hashed() -> None:
    """R1.7, its example [P1]: free [4,3,2,1] with 1 and 3 hashed, queue [5,6] -> [4,2,5,6,3,1]."""
    pool = BlockPool(7, True, 4)
    pool.get_new_blocks(4)
    register(pool, 1, b"h1")
    register(pool, 3, b"h3")
    freed = pool.free_blocks([pool.blocks[block_id] for block_id in (4, 3, 2, 1)])
    assert queue(pool) == [4, 2, 5, 6, 3, 1]
    assert [[block.block_id for block in part] for part in freed] == [[4, 2], [3, 1], []]


def test_with_caching_off_everything_is_appended() -> None:
    """R1.7 [P3]: queue [4,5], free [3,2,1] -> [4,5,3,2,1]."""
    pool = BlockPool(6, False)
    pool.get_new_blocks(3)
    free(pool, 3, 2, 1)
    assert queue(pool) == [4, 5, 3, 2, 1]


def test_freeing_in_an_order_makes_it_the_order_of_the_next_blocks() -> None:
    """S24 [P5]: 7, 1, 3."""
    pool = BlockPool(9, True, 4)
    pool.get_new_blocks(8)
    free(pool, 7, 1, 3)
    assert [block.block_id for block in pool.get_new_blocks(2)] == [7, 1]
    assert [block.block_id for block in pool.get_new_blocks(1)] == [3]


def test_unhashed_blocks_are_last_in_first_out_and_hashed_ones_first_in_first_out() -> None:
    """R1.8: no timestamps, only queue order."""
    pool = BlockPool(7, True, 4)
    pool.get_new_blocks(6)
    for block_id in (1, 2, 3):
        register(pool, block_id, bytes([block_id]))
    for block_id in (1, 4, 3, 5, 2, 6):
        free(pool, block_id)
    assert queue(pool) == [6, 5, 4, 1, 3, 2]


def test_one_shot_iterators_can_be_freed() -> None:
    pool = BlockPool(4, True, 4)
    taken = pool.get_new_blocks(3)
    pool.free_blocks(reversed(taken))
    assert queue(pool) == [3, 2, 1]


def test_taking_more_than_are_free_changes_nothing() -> None:
    """R1.5 [P1]."""
    pool = BlockPool(4, True, 4)
    pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="cannot get 2 blocks from the pool: 1 are free"):
        pool.get_new_blocks(2)
    assert queue(pool) == [3]
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 1, 0]


def test_touch_takes_an_unused_block_out_of_the_middle() -> None:
    """R1.6 [P1]."""
    pool = BlockPool(7, True, 4)
    pool.get_new_blocks(4)
    register(pool, 1, b"h1")
    register(pool, 3, b"h3")
    free(pool, 4, 3, 2, 1)
    pool.touch([pool.blocks[3]])
    pool.touch([pool.blocks[3]])
    assert queue(pool) == [4, 2, 5, 6, 1]
    assert pool.blocks[3].ref_cnt == 2
    free(pool, 3)
    assert queue(pool) == [4, 2, 5, 6, 1]
    free(pool, 3)
    assert queue(pool) == [4, 2, 5, 6, 1, 3]


def test_the_null_block_never_enters_the_queue() -> None:
    """R1.2: its ref_cnt is not maintained and may go below zero."""
    pool = BlockPool(3, True, 4)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.null_block.ref_cnt == 0
    pool.free_blocks([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == -2
    pool.touch([pool.null_block])
    assert queue(pool) == [1, 2]


def test_duplicates_stay_side_by_side() -> None:
    """R1.10 [P2]: the first inserted is found; the entry stays a list until it is empty."""
    pool = BlockPool(6, True, 4)
    pool.get_new_blocks(3)
    for block_id in (1, 2, 3):
        key = register(pool, block_id, b"h")
    cache = pool.cached_block_hash_to_block
    assert cache.block_ids(key) == [1, 2, 3]
    pool.evict_blocks({1})
    found = pool.get_cached_block(b"h", [0])
    assert found is not None
    assert found[0].block_id == 2
    pool.evict_blocks({2})
    assert cache.has_several(key)
    pool.evict_blocks({3})
    assert key not in cache
    assert pool.get_cached_block(b"h", [0]) is None


def test_a_hit_must_be_in_every_group() -> None:
    pool = BlockPool(4, True, 4)
    pool.get_new_blocks(2)
    pool.insert_block_hash(make_block_hash_with_group_id(b"h", 0), pool.blocks[1], 4)
    assert pool.get_cached_block(b"h", [0, 1]) is None
    pool.insert_block_hash(make_block_hash_with_group_id(b"h", 1), pool.blocks[2], 4)
    found = pool.get_cached_block(b"h", [0, 1])
    assert found is not None
    assert [block.block_id for block in found] == [1, 2]


def test_reallocation_drops_every_key_of_the_block() -> None:
    """R1.5, R1.12: the primary key and further ones, one BlockRemoved each; registering a key twice is nothing."""
    pool = BlockPool(3, True, 4, enable_kv_cache_events=True)
    pool.get_new_blocks(2)
    primary, extra = register(pool, 1, b"primary"), register(pool, 1, b"extra")
    register(pool, 1, b"extra")
    assert pool.cached_block_hashes_by_block == {1: {extra}}
    assert pool.blocks[1].block_hash == primary
    free(pool, 1)
    pool.get_new_blocks(1)
    assert pool.blocks[1].block_hash is None
    assert len(pool.cached_block_hash_to_block) == 0
    assert pool.take_events() == [BlockRemoved([b"primary"], "GPU", 0), BlockRemoved([b"extra"], "GPU", 0)]
    assert pool.take_events() == []


def test_reset_needs_an_unused_pool_and_keeps_the_order() -> None:
    """R1.14 [P2]."""
    pool = BlockPool(5, True, 4, enable_kv_cache_events=True)
    pool.get_new_blocks(2)
    register(pool, 1, b"h")
    assert not pool.reset_prefix_cache()
    assert pool.blocks[1].block_hash is not None
    free(pool, 2, 1)
    before = queue(pool)
    assert pool.reset_prefix_cache()
    assert queue(pool) == before == [2, 3, 4, 1]
    assert pool.blocks[1].block_hash is None
    assert pool.get_cached_block(b"h", [0]) is None
    assert pool.take_events() == [AllBlocksCleared()]


def test_usage_counts_cached_but_unused_blocks_as_free() -> None:
    """R1.15."""
    pool = BlockPool(5, True, 4)
    pool.get_new_blocks(2)
    assert pool.get_usage() == 0.5
    register(pool, 1, b"h")
    free(pool, 2, 1)
    assert pool.get_usage() == 0.0


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(InvalidInput, match="at least 2"):
        BlockPool(num_blocks)


def test_a_double_free_is_refused_and_undone() -> None:
    """S25: vLLM counts below zero in silence; here the call fails and nothing has changed."""
    pool = BlockPool(6, True, 4)
    taken = pool.get_new_blocks(4)
    pool.touch(taken[:1])
    free(pool, 2)
    before = queue(pool), [block.ref_cnt for block in pool.blocks]
    with pytest.raises(EngineError, match="block 2 is freed twice"):
        free(pool, 3, 1, 2, 4)
    assert (queue(pool), [block.ref_cnt for block in pool.blocks]) == before


def test_without_strict_a_double_free_shows_at_the_next_allocation() -> None:
    """S25 [P4], as vLLM has it."""
    pool = BlockPool(4, True, 4, compat="0.27.0")
    pool.get_new_blocks(1)
    free(pool, 1)
    free(pool, 1)
    assert pool.blocks[1].ref_cnt == -1
    with pytest.raises(AssertionError):
        pool.get_new_blocks(1)


class TestCacheFullBlocks:
    """R1.11."""

    def make(self, emit: list[Event] | None = None) -> tuple[BlockPool, Request]:
        pool = BlockPool(9, True, 4, enable_kv_cache_events=True, emit=emit.append if emit is not None else None)
        return pool, Request("A", range(13), block_hasher=BlockHasher(4, "sha256_cbor"))

    def test_one_stored_event_for_the_whole_range(self) -> None:
        pool, request = self.make()
        blocks = pool.get_new_blocks(4)
        pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
        pool.cache_full_blocks(request, blocks, 1, 3, 4, 0)
        pool.cache_full_blocks(request, blocks, 3, 3, 4, 0)
        first, second = pool.take_events()
        assert isinstance(first, BlockStored)
        assert (first.parent_block_hash, first.token_ids) == (None, [0, 1, 2, 3])
        assert isinstance(second, BlockStored)
        assert second.block_hashes == request.block_hashes[1:3]
        assert second.parent_block_hash == request.block_hashes[0]
        assert second.token_ids == list(range(4, 12))
        assert [block.block_hash_num_tokens for block in blocks] == [4, 8, 12, None]

    def test_null_and_masked_blocks_are_skipped_but_their_tokens_reported(self) -> None:
        """R9.1: token_ids may be longer than the hashes."""
        pool, request = self.make()
        taken = pool.get_new_blocks(2)
        pool.cache_full_blocks(request, [pool.null_block, *taken], 0, 3, 4, 0, [True, False, True])
        (event,) = pool.take_events()
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [request.block_hashes[2]]
        assert event.token_ids == list(range(12))
        assert pool.null_block.block_hash is None
        assert taken[0].block_hash is None

    def test_each_cached_block_is_reported_with_its_cause(self) -> None:
        seen: list[Event] = []
        pool, request = self.make(seen)
        pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0)
        pool.cache_full_blocks(request, pool.get_new_blocks(1), 0, 1, 4, 0)
        first, second, duplicate = seen
        assert isinstance(second, BlockCached)
        assert second.cause.kind is CauseKind.BLOCK_FULL
        assert second.cause.facts == {"logical_index": 1, "num_tokens": 8}
        assert (second.block_id, second.token_ids) == (2, [4, 5, 6, 7])
        assert isinstance(first, BlockCached)
        assert (first.parent_hash, second.parent_hash) == (None, first.block_hash)
        assert isinstance(duplicate, BlockCached)
        assert duplicate.duplicates == [1]


def test_an_eviction_is_reported_while_the_block_is_still_at_the_head() -> None:
    """R1.5: whoever looks meanwhile finds every free block in the queue, and the map agreeing with the blocks."""
    looks: list[tuple[int, list[int], int, bool]] = []

    def look(event: Event) -> None:
        assert isinstance(event, BlockEvicted)
        assert event.cause.facts == {"for_request": "B"}
        block = pool.blocks[event.block_id]
        looks.append((event.block_id, queue(pool), block.ref_cnt, block.block_hash is None))

    pool = BlockPool(4, True, 4, emit=look)
    pool.get_new_blocks(3)
    register(pool, 1, b"1")
    register(pool, 2, b"2")
    free(pool, 3, 2, 1)
    assert [block.block_id for block in pool.get_new_blocks(3, "B")] == [3, 2, 1]
    assert looks == [(2, [3, 2, 1], 0, True), (1, [3, 2, 1], 0, True)]
