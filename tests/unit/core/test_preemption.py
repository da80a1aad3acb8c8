"""Preemption (R7.5, R7.6): who loses its blocks, who waits, and what is left in the cache."""

from __future__ import annotations

import pytest

from engine.core.request import RequestStatus
from engine.trace.events import (
    CauseKind,
    RequestAdmitted,
    RequestPreempted,
    StepScheduled,
)
from tests.unit.core.counting_engine import Engine


def test_the_last_running_request_is_preempted_and_comes_back_with_its_own_blocks() -> None:
    """R7.5, R7.6 [T4]."""
    engine = Engine(6, compat="0.27.0")
    a, b = engine.add("A", 7, max_tokens=100), engine.add("B", 7, base=50, max_tokens=100)
    engine.step()
    engine.step()
    output = engine.step()
    assert output.preempted_req_ids == {"B"}
    assert output.num_scheduled_tokens == {"A": 1}
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert (engine.running, engine.waiting) == (["A"], ["B"])
    (event,) = engine.of(RequestPreempted)
    assert (event.request_id, event.num_lost_tokens) == ("B", 8)
    assert (event.cause.kind, event.cause.facts) == (CauseKind.LAST_RUNNING, {"for_request": "B"})  # the last one is B itself
    engine.scheduler.finish_requests("A", RequestStatus.FINISHED_ABORTED)
    output = engine.step()
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["B"], {"B"})
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([([3, 4, 5],)], [8])
    assert cached.all_token_ids == {"B": b.all_token_ids[:9]}
    assert output.finished_req_ids == {a.request_id}
    assert engine.of(RequestAdmitted)[-1].resumed


def test_several_victims_in_one_step_from_the_back() -> None:
    """R7.5, R7.6: the pool is one block short for A and again for B; then nothing is admitted in this step."""
    engine = Engine(7, compat="0.27.0")
    for index, request_id in enumerate("ABC"):
        engine.add(request_id, 8 if index < 2 else 7, base=40 * index, max_tokens=20)
    engine.step()
    output = engine.step()
    assert output.preempted_req_ids == {"C"}
    assert output.num_scheduled_tokens == {"A": 1, "B": 1}
    assert engine.waiting == ["C"]


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    """R7.6: the victim leaves a seat and room for W, which has to wait for the next step all the same."""
    engine = Engine(6, compat="0.27.0", policy="priority", max_num_seqs=2)
    engine.add("A", 7, priority=0)
    engine.add("B", 7, base=50, priority=5)
    engine.step()
    engine.add("W", 2, base=80, priority=1)
    engine.step()
    output = engine.step()
    assert (output.preempted_req_ids, output.num_scheduled_tokens) == ({"B"}, {"A": 1})
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 2
    assert engine.step().num_scheduled_tokens == {"A": 1, "W": 2}


def test_a_request_that_needs_its_own_blocks_preempts_itself() -> None:
    """R7.5 [T33]: then no running request is scheduled any more in this step."""
    engine = Engine(6, compat="0.27.0", max_num_batched_tokens=8, scheduler_reserve_full_isl=False)
    a = engine.add("A", 24)
    assert engine.step().num_scheduled_tokens == {"A": 8}
    assert engine.step().num_scheduled_tokens == {"A": 8}
    output = engine.step()
    assert (output.num_scheduled_tokens, output.preempted_req_ids) == ({}, {"A"})
    assert output.num_common_prefix_blocks == [0]
    assert a.status is RequestStatus.PREEMPTED


def test_priority_preempts_the_least_important_and_gives_its_budget_back() -> None:
    """R7.5: the victim had been scheduled in this step already; it is not in the output, and the budget is whole again."""
    engine = Engine(6, compat="0.27.0", policy="priority")
    low = engine.add("low", 7, priority=5, arrival_time=1.0)
    engine.add("high", 7, base=50, priority=0, arrival_time=2.0)
    engine.step()
    assert engine.running == ["high", "low"]
    engine.scheduler.running.reverse()  # as if the less important one had been admitted first
    engine.step()
    output = engine.step()
    assert output.num_scheduled_tokens == {"high": 1}
    assert output.preempted_req_ids == {"low"}
    assert low.status is RequestStatus.PREEMPTED
    assert engine.of(StepScheduled)[-1].token_budget_left == 8192 - 1
    cause = engine.of(RequestPreempted)[0].cause
    assert (cause.kind, cause.facts) == (CauseKind.LOWEST_PRIORITY, {"for_request": "high", "priority": 5})


def test_when_a_scheduled_victim_leaves_the_list_nobody_is_passed_over() -> None:
    """R7.5: low goes, high and mid move forward by one place; mid still gets its turn in this step."""
    engine = Engine(8, compat="0.27.0", policy="priority")
    engine.add("low", 7, priority=5)
    engine.step()
    engine.add("high", 7, base=50, priority=0)
    engine.add("mid", 5, base=80, priority=1)
    while engine.running != ["low", "high", "mid"] or engine.scheduler.requests["high"].num_computed_tokens < 8:
        engine.step()
    output = engine.step()
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"high": 1, "mid": 1}


@pytest.mark.parametrize("compat", [None, "0.27.0"])
def test_a_block_that_the_step_will_not_fill_after_all_leaves_the_cache(compat: str | None) -> None:
    """R7.7 registers low's block when its step is planned, R7.5 then unschedules low in the same step, and freeing keeps hashes (R5.6): its
    keys and values are never written. vLLM leaves it in the cache (compat mode)."""
    engine = Engine(9, compat=compat, policy="priority", long_prefill_token_threshold=8)
    low = engine.add("low", 23, priority=5, max_tokens=2)
    engine.step()
    engine.add("high", 8, base=50, priority=0, max_tokens=8)
    while not low.num_preemptions:
        num_written = low.num_computed_tokens
        output = engine.scheduler.schedule()
        if not low.num_preemptions:
            engine.answer(output)
    assert output.num_scheduled_tokens == {"high": 1}
    assert num_written == 16
    cached = {key[:-4] for key, _ in engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block.items()}
    unwritten = cached & set(low.block_hashes[num_written // 4 :])
    assert len(unwritten) == (0 if compat is None else 1)
    assert cached & set(low.block_hashes[: num_written // 4])
