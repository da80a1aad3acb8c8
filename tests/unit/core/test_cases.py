"""Public bug reports about KV-cache managers (by their numbers in tests/conformance/cases.py) where the conformance operations say too little.

Hits of A17 and A19 and the counters of A25 were read off real vLLM 0.27.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.block_hash import BlockHasher, MultiModalFeature, generate_block_hash_extra_keys
from engine.core.block_pool import BlockPool
from engine.core.compat import VLLM_0_27_0
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from engine.core.kv_events import BlockRemoved
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.errors import EngineError
from engine.trace.events import Cause, CauseKind

HASHER = BlockHasher(4, "sha256_cbor")
FULL = FullAttentionSpec(4)
WINDOW = SlidingWindowSpec(4, sliding_window=8)
STATES = MambaSpec(4, mamba_cache_mode="align")


def make_manager(num_blocks: int, *specs: KVCacheSpec, hash_block_size: int = 4, compat: str | None = None, events: bool = False) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks, groups)
    return KVCacheManager(config, 64, hash_block_size=hash_block_size, enable_kv_cache_events=events, compat=compat)


def start(manager: KVCacheManager, request: Request, num_new_tokens: int | None = None) -> int | None:
    """Admit `request` as a scheduler would and compute what it allocated: the tokens that were hit, or None when it was refused."""
    manager.new_step_starts()
    hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - hit.num_tokens if num_new_tokens is None else num_new_tokens
    if manager.allocate_slots(request, num_new, hit.num_tokens, hit.blocks, full_sequence_must_fit=True) is None:
        return None
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = hit.num_tokens + num_new
    return hit.num_tokens


def decode(manager: KVCacheManager, request: Request, token: int) -> bool:
    """One more token; False when there was no room for it."""
    manager.new_step_starts()
    if request.num_computed_tokens == request.num_tokens:
        request.append_output_token_ids(token)
    if manager.allocate_slots(request, 1) is None:
        return False
    request.num_computed_tokens += 1
    return True


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def check_pool(manager: KVCacheManager) -> None:
    """Block 0 is nobody's, every other block is either free or referenced, never both."""
    pool = manager.block_pool
    free = free_ids(manager)
    assert 0 not in free
    assert len(free) == len(set(free)) == pool.get_num_free_blocks()
    for block in pool.blocks[1:]:
        assert block.ref_cnt >= 0
        assert (block.ref_cnt == 0) == (block.block_id in set(free))


# ---------------------------------------------------------------------- A04, A10, A43
@pytest.mark.parametrize("enable_caching", [True, False])
def test_a04_block_0_is_never_handed_out_and_never_free(enable_caching: bool) -> None:
    """A04 (R1.1, R1.2): not when the pool is emptied, and not when a list with the null block in it is given back."""
    pool = BlockPool(5, enable_caching, 4)
    assert pool.null_block is pool.blocks[0]
    taken = pool.get_new_blocks(4)
    assert [block.block_id for block in taken] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="cannot get 1 blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block, *taken, pool.null_block])
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [1, 2, 3, 4]
    pool.touch([pool.null_block])
    assert pool.get_num_free_blocks() == 4


def test_a10_adopting_a_free_block_keeps_its_hash() -> None:
    """A10 (R1.6): only get_new_blocks drops a hash; a hit does not, so the next request hits too."""
    manager = make_manager(6, FULL, events=True)
    first = Request("A", range(8), block_hasher=HASHER)
    start(manager, first)
    manager.free(first)
    keys = [manager.block_pool.blocks[i].block_hash for i in (1, 2)]
    assert all(keys)
    manager.take_events()
    assert [start(manager, Request(name, range(9), block_hasher=HASHER)) for name in "BD"] == [8, 8]
    assert [manager.block_pool.blocks[i].block_hash for i in (1, 2)] == keys
    assert [manager.block_pool.blocks[i].ref_cnt for i in (1, 2)] == [2, 2]
    assert not [event for event in manager.take_events() if isinstance(event, BlockRemoved)]


def test_a43_a_pin_found_by_hash_is_not_the_requests_own_copy() -> None:
    """A43 (R1.10, S25): the lookup returns block 2, B's own copy is block 3; giving back 2 is an error here, giving back 3 is right."""
    manager = make_manager(8, FULL)
    first, second = Request("A", range(8), block_hasher=HASHER), Request("B", range(8), block_hasher=HASHER)
    start(manager, first)
    manager.free(first)
    start(manager, second)
    assert manager.get_block_ids("B") == ([1, 3],)
    found = manager.block_pool.get_cached_block(second.block_hashes[1], [0])
    assert found is not None
    assert [block.block_id for block in found] == [2]
    own = manager.block_pool.blocks[3]
    before = free_ids(manager)
    with pytest.raises(EngineError, match="block 2 is freed twice"):
        manager.block_pool.free_blocks(found)
    assert (free_ids(manager), own.ref_cnt, found[0].ref_cnt) == (before, 1, 0)
    manager.block_pool.touch([own])
    manager.block_pool.free_blocks([own])
    assert (free_ids(manager), own.ref_cnt) == (before, 1)
    check_pool(manager)


# ---------------------------------------------------------------------- A14, A25
class Engine:
    """A scheduler and a model that always says 7."""

    def __init__(self, num_blocks: int, block_size: int, **settings: Any) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_model_len=256, **settings),
            KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size))]),
            block_hasher=BlockHasher(block_size, "sha256_cbor"),
            hash_block_size=block_size,
        )
        self.preempted: list[str] = []
        self.resumed: dict[str, tuple[int, int]] = {}
        """Per resumed request its hit and what was scheduled behind it."""

    def add(self, request_id: str, num_tokens: int, base: int, max_tokens: int) -> Request:
        request = Request(request_id, range(base, base + num_tokens), SamplingParams(max_tokens=max_tokens))
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        computed = {request_id: request.num_computed_tokens for request_id, request in self.scheduler.requests.items()}
        output = self.scheduler.schedule()
        self.preempted += sorted(output.preempted_req_ids)
        cached = output.scheduled_cached_reqs
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            assert num_scheduled >= 1
            assert computed[request_id] + num_scheduled <= request.num_tokens  # A14
            if request_id in cached.resumed_req_ids:
                self.resumed[request_id] = (computed[request_id], num_scheduled)
            done = computed[request_id] + num_scheduled == request.num_tokens
            sampled[request_id] = [SampledToken(7, Cause(CauseKind.FORCED))] if done else []
        self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))


@pytest.mark.parametrize("budget", [4, 5, 16, 64])
def test_a14_computed_and_scheduled_never_pass_the_requests_length(budget: int) -> None:
    """A14 (R5.1, R7.3): the hit comes first, then the budget; checked in every step of a pool that is far too small."""
    engine = Engine(9, 4, max_num_batched_tokens=budget)
    requests = [engine.add(name, 11 + 2 * index, 0 if index < 2 else 100, 9) for index, name in enumerate("ABCD")]
    for _ in range(400):
        if engine.scheduler.has_unfinished_requests():
            engine.step()
    assert [request.num_output_tokens for request in requests] == [9] * 4
    assert engine.preempted
    assert any(hit for hit, _ in engine.resumed.values())


def test_a25_what_a_preempted_request_finds_again_is_counted_apart() -> None:
    """A25: two prompts of 34 tokens, nothing in common, blocks of 16. First admissions: 0 of 68 tokens hit. B comes back with 49 tokens and hits 16 of its own;
    one counter for both would show a hit rate that nobody has."""
    engine = Engine(7, 16)
    engine.add("A", 34, 0, 35)
    engine.add("B", 34, 1000, 35)
    seen = []
    for _ in range(60):
        if engine.scheduler.has_unfinished_requests():
            engine.step()
            stats = engine.scheduler.kv_cache_manager.make_prefix_cache_stats()
            counts = (stats.requests, stats.queries, stats.hits, stats.preempted_requests, stats.preempted_queries, stats.preempted_hits)
            if any(counts):
                seen.append(counts)
    assert engine.preempted == ["B"]
    assert engine.resumed == {"B": (16, 33)}
    assert seen == [(2, 68, 0, 0, 0, 0), (0, 0, 0, 1, 49, 16)]


# ---------------------------------------------------------------------- A17, A19
@pytest.mark.parametrize(("compat", "hit"), [(None, 0), (VLLM_0_27_0, 8)])
def test_a17_two_adapters_of_one_name(compat: str | None, hit: int) -> None:
    """A17: whoever loads other weights under an old name gets a new id, and must not meet the old blocks. vLLM 0.27.0 looks at the name alone."""
    hasher = BlockHasher(4, "sha256_cbor", compat=compat)
    manager = make_manager(10, FULL, compat=compat)
    assert start(manager, Request("A", range(9), lora_name="X", lora_int_id=1, block_hasher=hasher)) == 0
    assert manager.get_computed_blocks(Request("B", range(9), lora_name="X", lora_int_id=2, block_hasher=hasher)).num_tokens == hit
    assert manager.get_computed_blocks(Request("C", range(9), lora_name="X", lora_int_id=1, block_hasher=hasher)).num_tokens == 8
    assert manager.get_computed_blocks(Request("D", range(9), lora_name="Y", lora_int_id=1, block_hasher=hasher)).num_tokens == 0
    assert manager.get_computed_blocks(Request("E", range(9), block_hasher=hasher)).num_tokens == 0


P = 9
"""The one placeholder token of all images."""
TWO_IMAGES = [0, 1, P, P, P, P, P, 2, 3, P, P, P, 4]


def with_images(request_id: str, tokens: Sequence[int], *images: tuple[str, int, int], salt: str | None = None, lora: str | None = None) -> Request:
    features = [MultiModalFeature(*image) for image in images]
    return Request(request_id, tokens, mm_features=features, cache_salt=salt, lora_name=lora, block_hasher=HASHER)


def extra_keys(request: Request, compat: str | None = None) -> list[object]:
    """Per full block of the prompt."""
    return [generate_block_hash_extra_keys(request, start, start + 4, compat=compat) for start in range(0, request.num_tokens - 3, 4)]


@pytest.mark.parametrize(
    ("images", "keys", "hit"),
    [
        pytest.param([("P", 2, 5), ("Q", 9, 3)], [(("P", 2),), (("P", -2),), (("Q", 1),)], 12, id="the same images"),
        pytest.param([("P'", 2, 5), ("Q", 9, 3)], [(("P'", 2),), (("P'", -2),), (("Q", 1),)], 0, id="another first image"),
        pytest.param([("P", 2, 5), ("Q'", 9, 3)], [(("P", 2),), (("P", -2),), (("Q'", 1),)], 8, id="another second image"),
        pytest.param([], [None, None, None], 0, id="no image, the same tokens"),
    ],
)
def test_a19_images_with_one_placeholder(images: list[tuple[str, int, int]], keys: list[object], hit: int) -> None:
    """A19 (R2.4): every block that an image overlaps has (image, where it begins as seen from the block) among its keys."""
    manager = make_manager(20, FULL)
    start(manager, with_images("A", TWO_IMAGES, ("P", 2, 5), ("Q", 9, 3)))
    request = with_images("B", TWO_IMAGES, *images)
    assert extra_keys(request) == extra_keys(request, VLLM_0_27_0) == keys
    assert manager.get_computed_blocks(request).num_tokens == hit


def test_a19_the_text_before_an_image_is_shared() -> None:
    """A19: a block that no image overlaps has no key of it."""
    manager = make_manager(20, FULL)
    tokens = [0, 1, 2, 3, P, P, P, P, 5]
    start(manager, with_images("A", tokens, ("P", 4, 4)))
    assert extra_keys(with_images("B", tokens, ("R", 4, 4))) == [None, (("R", 0),)]
    assert manager.get_computed_blocks(with_images("B", tokens, ("R", 4, 4))).num_tokens == 4
    assert manager.get_computed_blocks(with_images("C", tokens, ("P", 4, 4))).num_tokens == 8


def test_a19_the_offset_inside_the_block_matters() -> None:
    """A19: the same image one token later is another prompt, although the placeholders look alike; so are two short images for one long."""
    manager = make_manager(20, FULL)
    tokens = [7, 8, P, P, P, P, P, P, P, P, 1]
    start(manager, with_images("A", tokens, ("P", 2, 8)))
    assert manager.get_computed_blocks(with_images("B", tokens, ("P", 3, 7))).num_tokens == 0
    shorter = with_images("C", tokens, ("P", 2, 4), ("P", 6, 4))
    assert extra_keys(shorter) == [(("P", 2),), (("P", -2), ("P", 2))]
    assert manager.get_computed_blocks(shorter).num_tokens == 4


def test_a19_the_order_of_all_keys_in_vllm() -> None:
    """R2.4: adapter, images, salt."""
    request = with_images("L", [0, 1, 2, 3, P, P, P, P, 5], ("P", 0, 3), ("Q", 3, 2), salt="s", lora="X")
    assert extra_keys(request, VLLM_0_27_0) == [("X", ("P", 0), ("Q", 3), "s"), ("X", ("Q", -1))]


# ---------------------------------------------------------------------- A40, A42, A47
@pytest.mark.parametrize(("window", "hit"), [(1, 0), (2, 16), (4, 16), (5, 16), (8, 16), (13, 16)])
@pytest.mark.parametrize("num_decodes", [0, 1, 6, 11])
def test_a40_what_was_adopted_is_given_back_once(window: int, hit: int, num_decodes: int) -> None:
    """A40 (R3.2, R3.5): a window moves between admission and the end, so some of the blocks touched then are no longer held.

    A window of 1 needs no block behind it, so vLLM registers none and hits none (R3.21)."""
    manager = make_manager(40, SlidingWindowSpec(4, sliding_window=window))
    first = Request("A", range(17), block_hasher=HASHER)
    second = Request("B", range(17), block_hasher=HASHER)
    assert start(manager, first) == 0
    assert start(manager, second) == hit
    for token in range(num_decodes):
        assert decode(manager, second, 100 + token)
        check_pool(manager)
    manager.free(second)
    second.status, second.num_computed_tokens = RequestStatus.PREEMPTED, 0
    check_pool(manager)
    manager.free(first)
    hit_again = start(manager, second)
    assert hit_again is not None
    assert hit_again >= hit
    check_pool(manager)
    manager.free(second)
    assert sorted(free_ids(manager)) == list(range(1, 40))


@pytest.mark.parametrize(
    ("specs", "num_needed"),
    [
        ((FULL, STATES), 4),
        ((FULL, MambaSpec(4, mamba_cache_mode="all")), 6),
        ((FULL, WINDOW), 6),
        ((FULL, WINDOW, STATES), 7),
    ],
    ids=["align", "all", "window", "three groups"],
)
def test_a42_a_refused_admission_leaves_every_group_untouched(specs: tuple[KVCacheSpec, ...], num_needed: int) -> None:
    """A42 (R5.3 d): 12 tokens in blocks of 4. One block short in the sum: refused, and no group has taken anything. One more: admitted, nothing left."""
    for full_fit in (True, False):
        manager = make_manager(num_needed, *specs)
        request = Request("A", range(12), block_hasher=HASHER)
        assert manager.allocate_slots(request, 12, full_sequence_must_fit=full_fit) is None
        assert free_ids(manager) == list(range(1, num_needed))
        assert not any(block.ref_cnt or block.block_hash for block in manager.block_pool.blocks[1:])
        assert manager.get_block_ids("A") == tuple([] for _ in specs)
        manager = make_manager(num_needed + 1, *specs)
        assert manager.allocate_slots(request, 12, full_sequence_must_fit=full_fit) is not None
        assert free_ids(manager) == []


def test_a47_the_estimate_covers_what_is_taken() -> None:
    """A47 (R3.3, R6.5): attention and states in blocks of 4, hashed every 2 tokens, so a prefill may end inside a block and leave a snapshot. In no pool,
    however small, is an allocation let in that then finds too few blocks; the pool would raise."""
    hasher = BlockHasher(2, "sha256_cbor")
    num_refused = num_copies = 0
    for num_blocks in range(3, 10):
        for num_prompt in range(1, 12):
            for first_chunk in range(1, num_prompt + 1):
                manager = make_manager(num_blocks, FULL, STATES, hash_block_size=2)
                request = Request("A", range(num_prompt), block_hasher=hasher)
                if start(manager, request, first_chunk) is None:
                    continue
                room = True
                while room and request.num_tokens < num_prompt + 6:
                    num_left = request.num_tokens - request.num_computed_tokens
                    if num_left > 1:
                        manager.new_step_starts()
                        room = manager.allocate_slots(request, num_left) is not None
                        request.num_computed_tokens += num_left if room else 0
                    else:
                        room = decode(manager, request, 50 + request.num_tokens)
                    copies, retained = manager.take_kv_cache_block_copies()
                    num_copies += len(copies)
                    manager.block_pool.free_blocks(retained)
                    check_pool(manager)
                num_refused += not room
                manager.free(request)
                assert sorted(free_ids(manager)) == list(range(1, num_blocks))
    assert num_refused > 50
    assert num_copies > 50
