"""Every lookup says why it stopped, block by block (R3.10, R3.20, R3.30, R3.40, R4.4, R5.1)."""

from __future__ import annotations

from typing import Any

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from engine.core.request import Request, RequestStatus
from engine.trace.events import AllocationRefused, CauseKind, Event, PrefixLookup


class Rig:
    """A manager that records, and requests with 4 tokens per hash."""

    def __init__(self, *specs: KVCacheSpec, num_blocks: int = 40, **settings: Any) -> None:
        self.events: list[Event] = []
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, groups), 256, emit=self.events.append, **settings)
        self.hasher = BlockHasher(self.manager.coordinator.hash_block_size, "sha256_cbor")

    def request(self, request_id: str, tokens: range | list[int], **keys: Any) -> Request:
        return Request(request_id, tokens, block_hasher=self.hasher, **keys)

    def start(self, request: Request) -> Request:
        hit = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit.num_tokens, hit.blocks) is not None
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        return request

    def lookup(self, request: Request) -> PrefixLookup:
        self.manager.get_computed_blocks(request)
        event = self.events[-1]
        assert isinstance(event, PrefixLookup)
        return event


def test_a_token_differs_and_the_block_behind_it_has_no_parent() -> None:
    rig = Rig(FullAttentionSpec(4))
    rig.start(rig.request("A", range(12)))
    found = rig.lookup(rig.request("B", [0, 1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11, 12]))
    assert found.num_hit_tokens == 4
    assert found.cause.kind is CauseKind.TOKEN_DIFFERS
    assert found.cause.facts == {"logical_index": 1, "position": 6, "token_id": 99, "other_token_id": 6, "other_request": "A"}
    assert [stop.cause.kind for stop in found.stops] == [CauseKind.TOKEN_DIFFERS, CauseKind.NOT_CACHED]


def test_an_evicted_block_names_the_step_and_who_took_it_and_strands_what_follows() -> None:
    """T3 in small: the blocks further right are still cached, but full attention cannot reach them (R3.10, S26)."""
    rig = Rig(FullAttentionSpec(4), num_blocks=4)
    rig.manager.free(rig.start(rig.request("A", range(12))))  # freed 3, 2, 1: block 3 goes first
    rig.manager.new_step_starts(7)
    rig.start(rig.request("C", range(50, 54)))
    found = rig.lookup(rig.request("B", range(13)))
    assert found.num_hit_tokens == 8
    assert found.cause.kind is CauseKind.EVICTED_EARLIER
    assert found.cause.facts == {"logical_index": 2, "num_tokens": 12, "step": 7, "for_request": "C"}
    rig.manager.evict_blocks({1})
    found = rig.lookup(rig.request("D", range(13)))
    assert found.num_hit_tokens == 0
    assert [(stop.logical_index, stop.cause.kind, stop.block_id) for stop in found.stops] == [
        (0, CauseKind.EVICTED_EARLIER, None),
        (1, CauseKind.PARENT_MISSING, 2),
        (2, CauseKind.EVICTED_EARLIER, None),
    ]


def test_a_salt_is_told_from_a_token() -> None:
    rig = Rig(FullAttentionSpec(4))
    rig.start(rig.request("A", range(9)))
    found = rig.lookup(rig.request("B", range(9), cache_salt="s"))
    assert found.cause.kind is CauseKind.EXTRA_KEYS_DIFFER
    assert found.cause.facts == {"logical_index": 0, "other_request": "A"}


def test_the_ends_that_need_no_other_request() -> None:
    rig = Rig(FullAttentionSpec(4))
    assert rig.lookup(rig.request("A", range(3))).cause.kind is CauseKind.PREFIX_TOO_SHORT
    rig.start(rig.request("B", range(8)))
    assert rig.lookup(rig.request("C", range(8))).cause.kind is CauseKind.LAST_TOKEN_RULE  # R5.1: one token must run
    assert rig.lookup(rig.request("D", range(10))).cause.kind is CauseKind.BLOCK_NOT_FULL
    assert rig.lookup(rig.request("E", range(100, 110))).cause.kind is CauseKind.NOT_CACHED
    assert Rig(FullAttentionSpec(4), enable_caching=False).lookup(rig.request("F", range(8))).cause.kind is CauseKind.CACHING_DISABLED


def test_a_draft_head_drops_a_block() -> None:
    """R3.10: T25, 13 tokens cached, 12 matched, 8 hit."""
    rig = Rig(FullAttentionSpec(4), use_eagle=True)
    rig.start(rig.request("A", range(13)))
    found = rig.lookup(rig.request("B", range(13)))
    assert (found.num_hit_tokens, found.cause.kind, found.cause.facts) == (8, CauseKind.EAGLE_DROP, {"num_dropped_tokens": 4})


def test_a_window_needs_an_unbroken_tail() -> None:
    """R3.20: window 8 needs two blocks; with block 3 of 4 gone there is one at the end, so the hit ends before the gap."""
    rig = Rig(SlidingWindowSpec(4, sliding_window=8))
    rig.start(rig.request("A", range(16)))
    rig.manager.evict_blocks({3})
    found = rig.lookup(rig.request("B", range(17)))
    assert found.num_hit_tokens == 8
    assert found.cause.kind is CauseKind.WINDOW_TAIL
    assert found.cause.facts == {"num_needed": 2, "num_found": 1}
    assert [(stop.logical_index, stop.cause.kind, stop.block_id) for stop in found.stops] == [
        (2, CauseKind.EVICTED_EARLIER, None),
        (3, CauseKind.NOT_USED, 4),
    ]


def test_chunks_hit_up_to_the_chunk_s_start() -> None:
    """R3.30, T12: with an empty cache 15 tokens hit the 8 of the chunk before."""
    found = Rig(ChunkedLocalAttentionSpec(4, attention_chunk_size=8)).lookup(Rig(FullAttentionSpec(4)).request("A", range(15)))
    assert (found.num_hit_tokens, found.cause.kind, found.cause.facts) == (8, CauseKind.CHUNK_START, {"num_tokens": 8})


def test_no_recurrent_state() -> None:
    found = Rig(MambaSpec(4, mamba_cache_mode="all")).lookup(Rig(FullAttentionSpec(4)).request("A", range(15)))
    assert (found.num_hit_tokens, found.cause.kind) == (0, CauseKind.NO_STATE)


def test_the_fixed_point_says_who_shortened_whom() -> None:
    """R4.6 (T22): full could give 32 tokens, window 8 without A@32 only 28."""
    rig = Rig(FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8), SlidingWindowSpec(4, sliding_window=16), num_blocks=60)
    rig.manager.free(rig.start(rig.request("A", range(32))))
    rig.manager.evict_blocks({16})
    found = rig.lookup(rig.request("B", range(33)))
    assert (found.num_hit_tokens, found.junction) == (28, 32)
    assert [(group.num_hit_tokens, group.cause.kind) for group in found.groups] == [
        (32, CauseKind.SHORTENED_BY_GROUP),
        (28, CauseKind.WINDOW_TAIL),
        (32, CauseKind.SHORTENED_BY_GROUP),
    ]
    assert found.groups[0].cause.facts == {"by_group": 1, "num_hit_tokens": 32}
    assert found.groups[1].block_ids == [0, 0, 0, 0, 0, 14, 15]
    assert found.cause == found.groups[1].cause


def test_the_alignment_of_a_hybrid_cuts_a_hit() -> None:
    """R4.7: full attention with blocks of 4 beside a window with blocks of 8 hits multiples of 8: 12 cached tokens give 8."""
    rig = Rig(FullAttentionSpec(4), SlidingWindowSpec(8, sliding_window=8))
    a = rig.start(rig.request("A", range(16)))
    rig.manager.evict_blocks({rig.manager.get_block_ids(a.request_id)[0][3]})
    found = rig.lookup(rig.request("B", range(17)))
    assert found.num_hit_tokens == 8
    assert (found.groups[0].num_hit_tokens, found.groups[0].cause.kind) == (8, CauseKind.ALIGNMENT)
    assert found.groups[0].cause.facts == {"alignment_tokens": 8, "num_cached_tokens": 12}
    assert [stop.cause.kind for stop in found.groups[0].stops] == [CauseKind.NOT_USED, CauseKind.EVICTED_EARLIER]


def test_a_state_that_this_step_writes_is_refused() -> None:
    """R3.41 (T13): the refusal says that it is no lack of blocks."""
    rig = Rig(MambaSpec(4, mamba_cache_mode="all"))
    rig.start(rig.request("A", range(13)))
    b = rig.request("B", range(13))
    hit = rig.manager.get_computed_blocks(b)
    assert rig.manager.allocate_slots(b, 13 - hit.num_tokens, hit.num_tokens, hit.blocks) is None
    refused = rig.events[-1]
    assert isinstance(refused, AllocationRefused)
    assert refused.cause.kind is CauseKind.STATE_NOT_WRITTEN
    rig.manager.new_step_starts(2)
    assert rig.manager.allocate_slots(b, 13 - hit.num_tokens, hit.num_tokens, hit.blocks) is not None


def test_every_full_attention_group_is_cut_to_the_common_hit() -> None:
    """R4.4: a block beyond the hit would be shared and then written. With compat 0.27.0 the second spec's hit stays longer, as there."""
    specs = (FullAttentionSpec(4), MLAAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8))
    for compat, lengths in ((None, [2, 2, 2]), ("0.27.0", [2, 4, 2])):
        rig = Rig(*specs, compat=compat)
        a = rig.start(rig.request("A", range(16)))
        rig.manager.evict_blocks(set(rig.manager.get_block_ids(a.request_id)[2][2:]))
        hit = rig.manager.get_computed_blocks(rig.request("B", range(17)))
        assert hit.num_tokens == 8
        assert [len(blocks) for blocks in hit.blocks.blocks] == lengths
