"""Bad input is refused by the call that brings it, in one sentence that says what, where and how to mend it; and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from engine.core.output import SampledToken
from engine.core.request import Request, RequestStatus
from engine.core.request_check import num_usable_blocks
from engine.errors import EngineError, InvalidInput, PagewalkError
from engine.trace.events import Cause, CauseKind
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import Mix
from tests.property.plain_state import PlainState, read_manager, read_scheduler
from tests.unit.core.counting_engine import Engine

HASHER = BlockHasher(4, "sha256_cbor")
NOTHING = PlainState()


def manager(num_blocks: int, *specs: KVCacheSpec, **settings: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig(num_blocks, [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]), 64, **settings)


def request(request_id: str, num_tokens: int) -> Request:
    return Request(request_id, range(num_tokens), block_hasher=HASHER)


def started(m: KVCacheManager, request_id: str = "A", num_tokens: int = 10) -> Request:
    """A running request with its prompt computed."""
    r = request(request_id, num_tokens)
    assert m.allocate_slots(r, num_tokens) is not None
    r.num_computed_tokens, r.status = num_tokens, RequestStatus.RUNNING
    return r


@contextmanager
def refused(look: Callable[[], object], error: type[PagewalkError], *parts: str) -> Iterator[None]:
    """The call inside raises `error` with a sentence that has these `parts`, and `look` sees the same before and after."""
    before = look()
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert look() == before


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: manager(9, FullAttentionSpec(4), SlidingWindowSpec(6, sliding_window=8), scheduler_block_size=8), ("6", "does not divide", "8")),
        (lambda: manager(9, FullAttentionSpec(4), SlidingWindowSpec(8, sliding_window=8), hash_block_size=8), ("group 0", "4 tokens", "hash_block_size 8")),
        (lambda: manager(9, FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8), hash_block_size=3), ("hash_block_size is 3", "does not divide")),
        (lambda: manager(9, FullAttentionSpec(4), hash_block_size=2), ("hash_block_size is 2", "its own block size, 4")),
        (lambda: SinkFullAttentionSpec(4, sink_len=6), ("sink_len is 6", "multiple of the block size, 4")),
    ],
)
def test_group_sizes_that_do_not_divide(build: Callable[[], object], parts: tuple[str, ...]) -> None:
    """R2.6."""
    with refused(lambda: NOTHING, InvalidInput, *parts):
        build()


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda n: SlidingWindowSpec(4, sliding_window=n), "sliding_window"),
        (lambda n: RSWASpec(4, rswa_window=n), "rswa_window"),
        (lambda n: ChunkedLocalAttentionSpec(4, attention_chunk_size=n), "attention_chunk_size"),
        (lambda n: FullAttentionSpec(n), "block_size"),
    ],
)
@pytest.mark.parametrize("size", [0, -3])
def test_a_window_smaller_than_one(build: Callable[[int], object], field: str, size: int) -> None:
    """A token sees at least itself (R3.20, R3.30, R3.50)."""
    with refused(lambda: NOTHING, InvalidInput, f"{field} is {size}", "at least 1"):
        build(size)


@pytest.mark.parametrize(
    ("num_blocks", "specs", "num_usable", "num_needed"),
    [
        (2, [FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8)], 1, 2),
        (3, [MambaSpec(4, mamba_cache_mode="align", num_speculative_blocks=2)], 2, 3),
        (3, [MambaSpec(4, mamba_cache_mode="all", num_speculative_blocks=2)], 2, 3),
        (3, [SinkFullAttentionSpec(4, sink_len=4), FullAttentionSpec(4)], 1, 2),
    ],
)
def test_a_pool_too_small_for_the_null_block_and_one_request(num_blocks: int, specs: list[KVCacheSpec], num_usable: int, num_needed: int) -> None:
    """R1.1, R1.16, R3.42, R3.43: every group takes a block, a sink its own before, and states for draft tokens stand beside."""
    with refused(lambda: NOTHING, InvalidInput, f"num_blocks is {num_blocks}", f"use {num_usable}", f"takes {num_needed}", "raise num_blocks"):
        manager(num_blocks, *specs)
    assert num_usable_blocks(manager(num_blocks + 1, *specs)) == num_usable + 1


@pytest.mark.parametrize("num_blocks", [1, 0, -1])
def test_a_pool_without_a_usable_block(num_blocks: int) -> None:
    """R1.1."""
    with refused(lambda: NOTHING, InvalidInput, f"num_blocks is {num_blocks}", "at least 2", "null block"):
        manager(num_blocks, FullAttentionSpec(4))


@pytest.mark.parametrize(
    ("specs", "settings", "parts"),
    [
        ([ChunkedLocalAttentionSpec(4, attention_chunk_size=8)], {"use_eagle": True}, ("chunked local attention", "draft head")),
        ([SlidingWindowSpec(4, sliding_window=8)], {"dcp_world_size": 2}, ("sliding_window", "dcp_world_size")),
        (
            [MambaSpec(4, mamba_cache_mode="align"), MambaSpec(8, mamba_cache_mode="align")],
            {},
            ("recurrent states differ", "('align', 4), ('align', 8)", "give all such groups the same"),
        ),
    ],
)
def test_combinations_that_would_fail_later(specs: list[KVCacheSpec], settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    """R3.30, R4.8, R3.44: refused when they are built, not at the first lookup."""
    with refused(lambda: NOTHING, InvalidInput, *parts):
        manager(20, *specs, **settings)


# ------------------------------------------------------------------ after the end
def over(m: KVCacheManager) -> Request:
    """A request that ran, ended and gave its blocks back, beside one that still runs."""
    started(m, "B", 6)
    r = started(m)
    r.status = RequestStatus.FINISHED_STOPPED
    m.free(r)
    return r


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda m, r: m.allocate_slots(r, 1), InvalidInput, ("'A'", "is over", "FINISHED_STOPPED", "add a new request")),
        (lambda m, r: m.cache_blocks(r, 8), InvalidInput, ("'A'", "is over", "FINISHED_STOPPED", "cache before the end")),
        (lambda m, r: m.remove_skipped_blocks("A", 8, 10), EngineError, ("'A'", "has no blocks", "is over")),
        (lambda m, r: m.free(r), EngineError, ("'A'", "is freed twice", "once only")),
    ],
)
@pytest.mark.parametrize("specs", [[FullAttentionSpec(4)], [FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=4)]])
def test_nothing_happens_to_a_request_that_is_over(specs: list[KVCacheSpec], call: Any, error: type[PagewalkError], parts: tuple[str, ...]) -> None:
    m = manager(16, *specs)
    r = over(m)
    with refused(lambda: (read_manager(m), r.num_computed_tokens, r.num_tokens), error, *parts):
        call(m, r)


def test_a_request_whose_blocks_somebody_else_gave_back() -> None:
    """S25: the table and the frontier stay, and the queue is not touched."""
    m = manager(16, FullAttentionSpec(4))
    r = started(m)
    m.block_pool.free_blocks(m.coordinator.single_type_managers[0].req_to_blocks["A"][1:2])
    r.status = RequestStatus.FINISHED_STOPPED
    for _ in range(2):
        with refused(lambda: read_manager(m), EngineError, "block 2 is freed twice", "once only"):
            m.free(r)


def test_a_block_is_freed_twice() -> None:
    """S25: also when it stands twice in one list; what stood before it is put back."""
    m = manager(16, FullAttentionSpec(4))
    started(m)
    blocks = m.block_pool.blocks
    for ids in ([5], [1, 2, 9], [3, 3]):
        with refused(lambda: read_manager(m), EngineError, f"block {ids[-1]} is freed twice", "once only"):
            m.block_pool.free_blocks([blocks[block_id] for block_id in ids])


# ------------------------------------------------------------------ requests
def test_a_request_id_is_used_twice() -> None:
    """While the first waits and while it runs; afterwards the id is free again."""
    engine = Engine(8)
    engine.add("A", 6)
    scheduler = engine.scheduler

    def look() -> object:
        return read_scheduler(scheduler, scheduler.requests.values(), NOTHING), dict(scheduler.requests), len(engine.events)

    with refused(look, InvalidInput, "'A' already", "its own id"):
        engine.add("A", 3, base=50)
    scheduler.schedule()
    with refused(look, InvalidInput, "'A' already", "its own id"):
        engine.add("A", 3, base=50)
    scheduler.finish_requests("A", RequestStatus.FINISHED_ABORTED)
    engine.add("A", 3, base=50)
    assert list(scheduler.requests) == ["A"]


def test_a_running_request_adopts_nothing() -> None:
    """R3.5: a second request under the id of one that runs is found out when it brings hits."""
    m = manager(16, FullAttentionSpec(4))
    started(m)
    again = request("A", 10)
    hit = m.get_computed_blocks(again)
    assert hit.num_tokens == 8
    with refused(lambda: read_manager(m), EngineError, "request A runs already"):
        m.allocate_slots(again, 2, hit.num_tokens, hit.blocks)


@pytest.mark.parametrize("bad", ["7", 7.0, None, True, [7]])
def test_a_token_that_is_not_an_int(bad: Any) -> None:
    """In a prompt, among outputs, and as a sampled token."""
    with refused(lambda: NOTHING, InvalidInput, "'A'", repr(bad), "position 2 of its prompt", "whole number"):
        Request("A", [1, 2, bad])
    r = request("A", 7)
    for outputs in ([5, bad], (5, bad)):
        with refused(lambda: (list(r.all_token_ids), list(r.block_hashes)), InvalidInput, "'A'", repr(bad), "position 1 of its outputs", "whole number"):
            r.append_output_token_ids(outputs)
    with refused(lambda: NOTHING, InvalidInput, repr(bad), "whole number"):
        SampledToken(bad, Cause(CauseKind.GREEDY))


@pytest.mark.parametrize("bad", [7.0, None, True])
def test_a_single_output_that_is_not_an_int(bad: Any) -> None:
    r = request("A", 7)
    with refused(lambda: (list(r.all_token_ids), list(r.block_hashes)), InvalidInput, "'A'", repr(bad), "position 0 of its outputs"):
        r.append_output_token_ids(bad)


def test_a_token_below_zero() -> None:
    r = request("A", 7)
    with refused(lambda: (list(r.all_token_ids), list(r.block_hashes)), InvalidInput, "token -1", "begin at 0"):
        r.append_output_token_ids(-1)
    with refused(lambda: NOTHING, InvalidInput, "-1", "from 0 on"):
        SampledToken(-1, Cause(CauseKind.GREEDY))


# ------------------------------------------------------------------ what is no error
def test_the_cache_is_forgotten_beside_a_sink() -> None:
    """R1.14, R1.16: blocks that are taken for good are no reason to refuse; blocks of a request are."""
    m = manager(9, SinkFullAttentionSpec(4, sink_len=8))
    r = started(m)
    assert not m.reset_prefix_cache()
    m.free(r)
    assert len(m.block_pool.cached_block_hash_to_block) == 2
    assert m.reset_prefix_cache()
    assert len(m.block_pool.cached_block_hash_to_block) == 0
    assert m.block_pool.get_num_free_blocks() == 6


@pytest.mark.parametrize(("reserve_full_isl", "num_usable"), [(False, 3), (True, 4)])
def test_a_request_that_fits_as_it_goes_is_let_in(reserve_full_isl: bool, num_usable: int) -> None:
    """R3.4: 39 tokens fill 10 blocks of 4, but with a window of 6 and 4 tokens in a step no more than 3 are held at a time; the full-sequence gate
    counts ceil((6 - 1 + 4) / 4) + 1 = 4."""
    mix = Mix([KVCacheGroupSpec(["layer"], SlidingWindowSpec(4, sliding_window=6))], None, False, None)
    for num_blocks in (1 + num_usable, num_usable):
        engine = DrivenScheduler(mix, num_blocks, max_num_batched_tokens=4, scheduler_reserve_full_isl=reserve_full_isl)
        r = engine.make([7] * 30, [8] * 10)
        if num_blocks > num_usable:
            engine.add(r)
            assert engine.run_to_end() is None
            assert r.status is RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            with refused(lambda it=engine: (read_manager(it.manager), dict(it.scheduler.requests)), InvalidInput, "'r0'", f"needs {num_usable} blocks"):  # type: ignore[misc]
                engine.add(r)
