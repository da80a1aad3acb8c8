"""Smallest cases of what the machines found: right by default, and as in vLLM 0.27.0 in compat mode where it differs."""

from __future__ import annotations

import pytest

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from engine.core.request import Request
from engine.trace.events import BlockEvicted, Event
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import Mix

FULL_AND_STATES = [
    KVCacheGroupSpec(["full"], FullAttentionSpec(4)),
    KVCacheGroupSpec(["states"], MambaSpec(4, mamba_cache_mode="align")),
]


def test_asynchronously_the_prompts_last_state_is_registered_once() -> None:
    """R6.3, R6.5: the second step is planned before the first one's token is known, so caching is asked for the same 3 tokens again while that step
    overwrites the state; only the copy has it."""
    engine = DrivenScheduler(Mix(FULL_AND_STATES, 1, False, None), 12, async_scheduling=True)
    engine.add(engine.make([0, 1, 0], [1, 1, 1]))
    assert engine.schedule().kv_cache_block_copies == []
    ((source, destination),) = engine.schedule().kv_cache_block_copies
    pool = engine.manager.block_pool
    key = engine.requests["r0"].block_hashes[2] + (1).to_bytes(4, "big")
    assert pool.cached_block_hash_to_block.block_ids(key) == [destination]
    assert pool.blocks[source].block_hash is None
    engine.check()
    assert engine.run_to_end() is None


@pytest.mark.parametrize(("compat", "num_hit_tokens"), [(None, 0), ("0.27.0", 4)])
def test_a_chunk_that_begins_inside_a_block(compat: str | None, num_hit_tokens: int) -> None:
    """R3.30: of 8 tokens at most 7 can be hit, and token 7 reads its chunk from token 6 on, which lies inside block 1. Nothing is cached, so the hit would end
    at token 4, in the chunk before, of which there is nothing either."""
    config = KVCacheConfig(9, [KVCacheGroupSpec(["layer"], ChunkedLocalAttentionSpec(4, attention_chunk_size=6))])
    manager = KVCacheManager(config, 64, compat=compat)
    hit = manager.get_computed_blocks(Request("A", range(8), block_hasher=BlockHasher(4, "sha256_cbor")))
    assert hit.num_tokens == num_hit_tokens


def test_a_chunk_that_begins_at_a_block_is_a_hit_without_looking() -> None:
    """R3.30 [T12]: 15 tokens with chunks of 8: 8 are hit in an empty cache, by default too."""
    config = KVCacheConfig(9, [KVCacheGroupSpec(["layer"], ChunkedLocalAttentionSpec(4, attention_chunk_size=8))])
    hit = KVCacheManager(config, 64).get_computed_blocks(Request("A", range(15), block_hasher=BlockHasher(4, "sha256_cbor")))
    assert (hit.num_tokens, hit.blocks.get_block_ids()) == (8, ([0, 0],))


def test_several_keys_of_a_block_go_one_by_one() -> None:
    """R1.12: a block with an entry that ends inside it and a full one loses two keys; each report finds the other key still there, the primary one last."""
    heard: list[tuple[str, list[str]]] = []

    def hear(event: Event) -> None:
        if isinstance(event, BlockEvicted):
            heard.append((event.block_hash, list(pool.keys_of(pool.blocks[event.block_id]))))

    config = KVCacheConfig(9, FULL_AND_STATES)
    pool = KVCacheManager(config, 64, hash_block_size=2, emit=hear).block_pool
    block = pool.blocks[3]
    pool.insert_block_hash(b"full" + bytes(4), block, 4)
    pool.insert_block_hash(b"part" + bytes(4), block, 4)
    pool.evict_blocks([3])
    assert heard == [(b"part".hex(), [f"{b'full'.hex()}:0"]), (b"full".hex(), [])]
