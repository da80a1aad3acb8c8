"""KVCacheManager (section 5): lookups are pure, allocate_slots has an order, refusals change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from engine.core.request import Request, RequestStatus
from engine.errors import InvalidInput
from engine.trace.events import AllocationRefused, BlocksAllocated, BlocksFreed, BlocksTouched, CauseKind, Event, PrefixLookup, kind_of

HASHER = BlockHasher(4, "sha256_cbor")


def config(num_blocks: int, num_groups: int = 1) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [KVCacheGroupSpec([f"layer{i}"], FullAttentionSpec(4)) for i in range(num_groups)])


def manager(num_blocks: int = 8, emit: Callable[[Event], None] | None = None, *, enable_caching: bool = True, watermark: float = 0.0) -> KVCacheManager:
    return KVCacheManager(config(num_blocks), 64, enable_caching=enable_caching, watermark=watermark, emit=emit)


def request(request_id: str, num_tokens: int, base: int = 0) -> Request:
    return Request(request_id, range(base, base + num_tokens), block_hasher=HASHER)


def start(m: KVCacheManager, r: Request, num_new_tokens: int | None = None) -> list[int] | None:
    """Admit `r` as a scheduler would; the new block ids, or None."""
    hit = m.get_computed_blocks(r)
    new = m.allocate_slots(r, num_new_tokens or r.num_tokens - hit.num_tokens, hit.num_tokens, hit.blocks)
    if new is None:
        return None
    r.num_computed_tokens = r.num_tokens if num_new_tokens is None else hit.num_tokens + num_new_tokens
    r.status = RequestStatus.RUNNING
    return new.get_block_ids()[0]


def look(m: KVCacheManager) -> tuple[object, ...]:
    pool = m.block_pool
    return (
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [block.ref_cnt for block in pool.blocks],
        list(pool.cached_block_hash_to_block.items()),
        {r: [b.block_id for b in t] for r, t in m.coordinator.single_type_managers[0].req_to_blocks.items()},
        dict(m.coordinator.single_type_managers[0].num_cached_block),
    )


def test_the_same_prompt_hits_full_blocks_only() -> None:
    """S1 [T1]: 7 tokens, block size 4: one block, 4 tokens are hit, 3 recomputed in a new block; the tails stay private."""
    m = manager()
    a, b = request("A", 7), request("B", 7)
    assert start(m, a) == [1, 2]
    hit = m.get_computed_blocks(b)
    assert (hit.num_tokens, hit.blocks.get_block_ids()) == (4, ([1],))
    assert start(m, b) == [3]
    assert m.get_block_ids("B") == ([1, 3],)
    assert [m.block_pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [2, 1, 1]


def test_one_token_must_run_so_an_exact_multiple_recomputes_a_block() -> None:
    """R5.1 [T2]: 8 tokens hit 4, and the second block is cached twice."""
    m = manager()
    a, b = request("A", 8), request("B", 8)
    start(m, a)
    assert m.get_computed_blocks(b).num_tokens == 4
    start(m, b)
    assert [ids for _, ids in m.block_pool.cached_block_hash_to_block.items()] == [[1], [2, 3]]


def test_a_lookup_changes_nothing() -> None:
    """R5.1, S10."""
    m = manager()
    start(m, request("A", 12))
    before = look(m)
    for _ in range(3):
        assert m.get_computed_blocks(request("B", 12)).num_tokens == 8
    assert look(m) == before


@pytest.mark.parametrize(("use_eagle", "flagged", "num_hit_tokens"), [(False, False, 12), (True, False, 8), (False, True, 8), (True, True, 8)])
def test_an_eagle_group_drops_the_last_matched_block(use_eagle: bool, flagged: bool, num_hit_tokens: int) -> None:
    """R3.10 [T25]: 13 tokens match 3 blocks, the last is dropped and recomputed for the draft head."""
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(4), is_eagle_group=flagged)
    m = KVCacheManager(KVCacheConfig(12, [group]), 64, use_eagle=use_eagle)
    start(m, request("A", 13))
    assert m.get_computed_blocks(request("B", 13)).num_tokens == num_hit_tokens


def test_reading_the_cache_can_be_skipped() -> None:
    """R5.1."""
    m = manager()
    start(m, request("A", 12))
    b = Request("B", range(12), block_hasher=HASHER, skip_reading_prefix_cache=True)
    assert m.get_computed_blocks(b).num_tokens == 0


def test_blocks_are_registered_before_the_model_runs_and_only_full_ones() -> None:
    """R5.3 (g), S9."""
    m = manager()
    a = request("A", 11)
    hit = m.get_computed_blocks(a)
    m.allocate_slots(a, 11, hit.num_tokens, hit.blocks)
    assert a.num_computed_tokens == 0
    assert [block.block_hash_num_tokens for block in m.block_pool.blocks[1:4]] == [4, 8, None]


def test_lookahead_slots_are_allocated_but_not_cached() -> None:
    """R5.3 (d), (g) [T24]."""
    m = manager(12)
    a = request("A", 7)
    new = m.allocate_slots(a, 7, num_lookahead_tokens=3)
    assert new is not None
    assert new.get_block_ids() == ([1, 2, 3],)
    assert m.coordinator.single_type_managers[0].num_cached_block["A"] == 1


def test_delayed_caching_registers_nothing() -> None:
    m = manager()
    m.allocate_slots(request("A", 8), 8, delay_cache_blocks=True)
    assert len(m.block_pool.cached_block_hash_to_block) == 0


def test_slots_never_pass_max_model_len() -> None:
    """R5.3 (d): min(..., max_len)."""
    m = KVCacheManager(config(9), 8)
    new = m.allocate_slots(request("A", 7), 7, num_lookahead_tokens=9)
    assert new is not None
    assert new.get_block_ids() == ([1, 2],)


def test_evictable_hits_count_against_the_capacity() -> None:
    """R3.3, R5.5 [T4]: 1 new + 2 hit blocks that are free themselves = 3 > 2."""
    m = manager(6)
    b = request("B", 8, base=50)
    start(m, b)
    b.append_output_token_ids(9)
    m.free(b)
    b.num_computed_tokens, b.status = 0, RequestStatus.PREEMPTED
    start(m, request("A", 12))
    assert m.block_pool.get_num_free_blocks() == 2
    before = look(m)
    hit = m.get_computed_blocks(b)
    assert hit.num_tokens == 8
    assert m.allocate_slots(b, 1, hit.num_tokens, hit.blocks) is None
    assert look(m) == before


def test_hits_are_adopted_before_anything_is_allocated() -> None:
    """R5.3 (e): the request's own hits are at the head of the queue and must not be taken for its new block."""
    m = manager(4)
    a = request("A", 8)
    start(m, a)
    m.free(a)
    assert look(m)[0] == [3, 2, 1]
    c = request("C", 4, base=90)
    start(m, c)
    assert look(m)[0] == [2, 1]
    assert start(m, request("B", 8)) == [2]
    assert m.get_block_ids("B") == ([1, 2],)


def test_the_gate_refuses_before_the_chunk_would_fit() -> None:
    """R5.3 (b), R7.4: the whole sequence must fit although only a chunk is asked for."""
    seen: list[Event] = []
    m = manager(5, seen.append)
    a = request("A", 20)
    assert m.allocate_slots(a, 4, full_sequence_must_fit=True) is None
    (refused,) = seen
    assert isinstance(refused, AllocationRefused)
    assert refused.at_gate
    assert refused.cause.kind is CauseKind.INSUFFICIENT_BLOCKS
    facts = {"num_required": 5, "num_evictable_hits": 0, "num_watermark": 0, "num_free": 4, "num_reserved": 0}
    assert refused.cause.facts == facts
    assert m.allocate_slots(a, 4) is not None


def test_reserved_blocks_cannot_be_taken() -> None:
    """R5.3 (d)."""
    m = manager(5)
    assert m.allocate_slots(request("A", 9), 9, reserved_blocks=2) is None
    assert m.allocate_slots(request("A", 9), 9, reserved_blocks=1) is not None


def test_the_watermark_binds_only_waiting_requests_while_others_run() -> None:
    """R5.3 (a) [T17]: int(0.3 * 11) = 3 blocks stay free."""
    m = manager(11, watermark=0.3)
    a = request("A", 32)
    assert m.allocate_slots(a, 32, has_scheduled_reqs=False) is not None
    assert m.block_pool.get_num_free_blocks() == 2
    b = request("B", 4, base=70)
    assert m.allocate_slots(b, 4, has_scheduled_reqs=True) is None
    a.status, a.num_computed_tokens = RequestStatus.RUNNING, 32
    a.append_output_token_ids(1)
    assert m.allocate_slots(a, 1, has_scheduled_reqs=True) is not None
    assert m.allocate_slots(b, 4, has_scheduled_reqs=False) is not None


def test_nothing_to_allocate_for_is_an_error() -> None:
    """R5.2."""
    with pytest.raises(ValueError, match="num_new_tokens is 0"):
        manager().allocate_slots(request("A", 4), 0)


def test_the_tail_is_freed_first() -> None:
    """R1.9, R5.6: unhashed tail to the head, hashed blocks to the tail, last block first; table and frontier are gone."""
    m = manager(8)
    a = request("A", 11)
    start(m, a)
    m.free(a)
    assert look(m) == ([3, 4, 5, 6, 7, 2, 1], [0] * 8, [(k, v) for k, v in m.block_pool.cached_block_hash_to_block.items()], {}, {})
    m.free(a)
    assert look(m)[0] == [3, 4, 5, 6, 7, 2, 1]


def test_common_prefix_blocks() -> None:
    """R3.11: leading blocks with as many references as requests; a lone request reports all of its own; an unknown one none."""
    m = manager(12)
    start(m, request("A", 11))
    assert m.get_num_common_prefix_blocks("A") == [3]
    start(m, request("B", 11))
    assert m.get_num_common_prefix_blocks("B") == [2]
    assert m.get_num_common_prefix_blocks("nobody") == [0]
    start(m, request("C", 8, base=40))
    assert m.get_num_common_prefix_blocks("A") == [0]


def test_without_caching_any_number_of_groups_shares_the_pool_and_nothing_is_hashed() -> None:
    """R4.1, R3.11: NoPrefixCache."""
    m = KVCacheManager(config(9, num_groups=2), 64, enable_caching=False)
    a = request("A", 8)
    new = m.allocate_slots(a, 8)
    assert new is not None
    assert new.get_block_ids() == ([1, 2], [3, 4])
    hit = m.get_computed_blocks(request("B", 8))
    assert (hit.num_tokens, hit.blocks.get_block_ids()) == (0, ([], []))
    assert m.get_num_common_prefix_blocks("A") == [0, 0]
    m.free(a)
    assert [b.block_id for b in m.block_pool.free_block_queue.get_all_free_blocks()] == [5, 6, 7, 8, 2, 1, 4, 3]


class TestLookupCauses:
    """Where and why the walk stopped."""

    @pytest.mark.parametrize(
        ("num_tokens", "kind", "facts"),
        [
            (3, CauseKind.PREFIX_TOO_SHORT, {"num_tokens": 3, "block_size": 4}),
            (4, CauseKind.LAST_TOKEN_RULE, {"logical_index": 0, "max_hit_tokens": 3}),
            (7, CauseKind.BLOCK_NOT_FULL, {"logical_index": 1, "num_filled": 3, "block_size": 4}),
            (8, CauseKind.LAST_TOKEN_RULE, {"logical_index": 1, "max_hit_tokens": 7}),
            (13, CauseKind.NOT_CACHED, {"logical_index": 2, "num_tokens": 12}),
        ],
    )
    def test_cause(self, num_tokens: int, kind: CauseKind, facts: dict[str, int]) -> None:
        seen: list[Event] = []
        m = manager(12, seen.append)
        start(m, request("A", 8))
        seen.clear()
        hit = m.get_computed_blocks(request("B", num_tokens))
        (event,) = seen
        assert isinstance(event, PrefixLookup)
        assert (event.cause.kind, event.cause.facts) == (kind, facts)
        assert event.num_hit_tokens == hit.num_tokens == 4 * len(event.hit_block_ids)

    def test_caching_off(self) -> None:
        seen: list[Event] = []
        m = manager(8, seen.append, enable_caching=False)
        m.get_computed_blocks(request("A", 8))
        assert [event.cause.kind for event in seen] == [CauseKind.CACHING_DISABLED]


def test_every_step_of_an_admission_is_reported_after_the_books_are_right() -> None:
    """Adopt, allocate, register, in this order (R5.3 e-g); at each report the counts equal the table entries."""
    kinds: list[str] = []

    def check(event: Event) -> None:
        kinds.append(kind_of(event))
        counts = [0] * len(m.block_pool.blocks)
        for table in m.coordinator.single_type_managers[0].req_to_blocks.values():
            for block in table:
                counts[block.block_id] += 1
        assert [block.ref_cnt for block in m.block_pool.blocks] == counts
        queued = {block.block_id for block in m.block_pool.free_block_queue.get_all_free_blocks()}
        assert queued == {i for i, count in enumerate(counts) if i and not count}
        if isinstance(event, BlocksTouched):
            assert (event.block_ids, event.left_free_queue) == ([1], [1])
            assert event.cause.facts == {"num_hit_tokens": 4, "num_from_queue": 1}
        if isinstance(event, BlocksAllocated) and event.request_id == "B":
            assert event.cause.facts == {"num_tokens": 9, "num_required": 3, "num_held": 1, "num_free": 6}
        if isinstance(event, BlocksFreed):
            assert (event.block_ids, event.prepended, event.appended) == ([2, 1], [2], [1])

    m = manager(8, check)
    a = request("A", 7)
    start(m, a)
    m.free(a)
    b = Request("B", [0, 1, 2, 3, 9, 9, 9, 9, 9], block_hasher=HASHER)
    start(m, b)
    first = ["prefix_lookup", "blocks_allocated", "block_cached", "blocks_freed"]
    assert kinds == [*first, "prefix_lookup", "blocks_touched", "blocks_allocated", "block_cached"]


class UnknownSpec(KVCacheSpec):
    kind = "unheard_of"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: KVCacheManager(config(8), 0), "max_model_len is 0"),
        (lambda: KVCacheManager(config(8), 8, watermark=1.0), "watermark is 1.0"),
        (lambda: KVCacheManager(config(8, num_groups=2), 8), "2 KV-cache groups"),
        (lambda: KVCacheManager(config(8), 8, hash_block_size=2), "its own block size, 4"),
        (lambda: config(1), "num_blocks is 1"),
        (lambda: KVCacheConfig(8, []), "no KV-cache group"),
        (lambda: FullAttentionSpec(0), "block_size is 0"),
        (lambda: FullAttentionSpec(4, num_kv_heads=0), "num_kv_heads is 0"),
        (lambda: KVCacheManager(KVCacheConfig(8, [KVCacheGroupSpec(["l"], UnknownSpec(4))]), 8), "'unheard_of' has no KV-cache manager"),
    ],
)
def test_impossible_settings_are_refused(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build()


def test_page_size() -> None:
    """R8.7, F1: OPT-13B, 800 KiB per token over 40 layers, so 20 KiB per token and layer."""
    assert FullAttentionSpec(16, num_kv_heads=40, head_size=128, dtype_bytes=2).page_size_bytes == 16 * 20 * 1024
