"""The scheduler (section 7): budget, chunks, admission, preemption, ends; and what it tells the worker and the recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.output import ModelRunnerOutput, SampledToken
from engine.core.request import Request, RequestStatus
from engine.errors import InvalidInput
from engine.trace.events import (
    AllocationRefused,
    Cause,
    CauseKind,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestScheduled,
    StepScheduled,
    TokenSampled,
    kind_of,
)
from tests.unit.core.counting_engine import Engine


def test_computed_tokens_move_on_when_scheduled() -> None:
    """R7.1: before anything has run."""
    engine = Engine(9)
    a = engine.add("A", 7)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"A": 7}
    assert (a.num_computed_tokens, a.status) == (7, RequestStatus.RUNNING)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    assert engine.scheduler.schedule().num_scheduled_tokens == {}


def test_chunked_by_the_budget() -> None:
    """R7.2, R7.3 [T5]: budget 8, prompts 18 and 3."""
    engine = Engine(20, max_num_batched_tokens=8)
    engine.add("A", 18, max_tokens=2)
    engine.add("B", 3, base=50, max_tokens=3)
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [{"A": 8}, {"A": 8}, {"A": 2, "B": 3}, {"A": 1, "B": 1}]
    causes = [event.cause for event in engine.of(RequestScheduled)]
    assert [cause.kind for cause in causes] == [
        CauseKind.CHUNKED_BY_BUDGET,
        CauseKind.CHUNKED_BY_BUDGET,
        CauseKind.PREFILL,
        CauseKind.PREFILL,
        CauseKind.DECODE,
        CauseKind.DECODE,
    ]
    assert causes[0].facts == {"num_wanted": 18, "num_new_tokens": 8, "token_budget": 8}
    assert [event.token_budget_left for event in engine.of(StepScheduled)] == [0, 0, 3, 6]


def test_chunked_by_the_threshold() -> None:
    """R7.2."""
    engine = Engine(20, long_prefill_token_threshold=5)
    engine.add("A", 12)
    engine.add("B", 3, base=50)
    assert engine.step().num_scheduled_tokens == {"A": 5, "B": 3}
    assert engine.step().num_scheduled_tokens == {"A": 5, "B": 1}
    assert engine.step().num_scheduled_tokens == {"A": 2, "B": 1}
    cause = engine.of(RequestScheduled)[0].cause
    assert (cause.kind, cause.facts) == (CauseKind.CHUNKED_BY_THRESHOLD, {"num_wanted": 12, "num_new_tokens": 5, "threshold": 5})


def test_without_chunked_prefill_a_prompt_waits_for_a_budget_that_holds_it() -> None:
    """R7.3."""
    engine = Engine(20, max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add("A", 6)
    engine.add("B", 6, base=50)
    assert engine.step().num_scheduled_tokens == {"A": 6}
    assert engine.step().num_scheduled_tokens == {"A": 1, "B": 6}
    with pytest.raises(InvalidInput, match="without chunked prefill"):
        engine.add("C", 9)


def test_no_more_than_max_num_seqs_run() -> None:
    """R7.3."""
    engine = Engine(20, max_num_seqs=2)
    for index in range(3):
        engine.add(f"{index}", 3, base=10 * index, max_tokens=1)
    assert engine.step().num_scheduled_tokens == {"0": 3, "1": 3}
    assert engine.step().num_scheduled_tokens == {"2": 3}


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    """R7.3: C would fit, but B is first."""
    engine = Engine(7)
    engine.add("A", 12, max_tokens=4)
    engine.add("B", 16, base=50, max_tokens=4)
    engine.add("C", 3, base=80, max_tokens=4)
    engine.step()
    assert (engine.running, engine.waiting) == (["A"], ["B", "C"])
    (refused,) = engine.of(AllocationRefused)
    assert (refused.request_id, refused.at_gate) == ("B", True)
    assert refused.cause.facts == {"num_required": 4, "num_evictable_hits": 0, "num_watermark": 0, "num_free": 3, "num_reserved": 0}


def test_a_block_registered_in_this_step_can_be_hit_in_this_step() -> None:
    """S9, R3.41 [T6]: attention has no same-step rule."""
    engine = Engine(20)
    engine.add("A", 9, max_tokens=1)
    engine.add("B", 9, max_tokens=1)
    assert engine.step().num_scheduled_tokens == {"A": 9, "B": 1}
    admitted = engine.of(RequestAdmitted)
    assert [event.num_computed_tokens for event in admitted] == [0, 8]
    assert admitted[1].cause.facts == {"num_required": 1, "num_free": 16}


def test_priority_serves_the_smallest_number_first_then_arrival() -> None:
    engine = Engine(20, policy="priority", max_num_seqs=1)
    engine.add("late", 3, base=10, priority=1, arrival_time=9.0)
    engine.add("early", 3, base=20, priority=1, arrival_time=1.0)
    engine.add("urgent", 3, base=30, priority=0, arrival_time=5.0)
    assert engine.waiting == ["urgent", "early", "late"]
    assert engine.step().num_scheduled_tokens == {"urgent": 3}


def test_a_final_token_on_the_boundary_leaves_its_block_unhashed() -> None:
    """R7.7 [T39]: prompt 7, one output: only the first block is cached, and the second is the next to be handed out."""
    engine = Engine(8)
    a = engine.add("A", 7, max_tokens=1)
    engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert len(a.block_hashes) == 2
    assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == [2, 3, 4, 5, 6, 7, 1]
    assert [b.block_id for b in pool.blocks if b.block_hash] == [1]


@pytest.mark.parametrize(
    ("options", "tokens", "reason", "status", "kind"),
    [
        ({"max_tokens": 2}, [11, 12, 13], "length", RequestStatus.FINISHED_LENGTH_CAPPED, CauseKind.MAX_TOKENS),
        ({"max_tokens": 9, "stop": (12,)}, [11, 12, 13], "stop", RequestStatus.FINISHED_STOPPED, CauseKind.STOP_TOKEN),
        ({"max_tokens": 2, "stop": (12,)}, [11, 12, 13], "stop", RequestStatus.FINISHED_STOPPED, CauseKind.STOP_TOKEN),
        ({"max_tokens": 9}, [11, 12, 13], "length", RequestStatus.FINISHED_LENGTH_CAPPED, CauseKind.MAX_MODEL_LEN),
    ],
)
def test_the_stop_check_follows_every_token(options: dict[str, Any], tokens: list[int], reason: str, status: RequestStatus, kind: CauseKind) -> None:
    """R7.8: the second of three tokens ends it, the third is not appended; the request is handed back and forgotten."""
    engine = Engine(9, max_model_len=7)
    a = engine.add("A", 5, **options)
    output = engine.scheduler.schedule()
    assert engine.answer(output, {"A": tokens}) == [a]
    assert a.output_token_ids == tokens[:2]
    assert (a.status, a.get_finished_reason()) == (status, reason)
    assert engine.scheduler.requests == {}
    assert not engine.scheduler.has_unfinished_requests()
    (finished,) = engine.of(RequestFinished)
    assert (finished.reason, finished.cause.kind) == (reason, kind)
    assert [kind_of(event) for event in engine.events[-2:]] == ["request_finished", "blocks_freed"]
    assert [(event.token_id, event.position) for event in engine.of(TokenSampled)] == [(11, 5), (12, 6)]
    assert engine.scheduler.schedule().finished_req_ids == {"A"}
    assert engine.scheduler.schedule().finished_req_ids == set()


def test_aborting_a_running_and_a_waiting_request() -> None:
    engine = Engine(9, max_num_seqs=1)
    a, b = engine.add("A", 5), engine.add("B", 5, base=50)
    output = engine.scheduler.schedule()
    assert engine.scheduler.finish_requests(["B", "A", "nobody"], RequestStatus.FINISHED_ABORTED) == [b, a]
    assert (engine.running, engine.waiting) == ([], [])
    assert engine.scheduler.update_from_output(output, ModelRunnerOutput({"A": [SampledToken(1, Cause(CauseKind.GREEDY))]})) == []
    assert a.output_token_ids == []
    assert engine.scheduler.kv_cache_manager.usage == 0.0
    with pytest.raises(ValueError, match="RUNNING is not the end"):
        engine.scheduler.finish_requests("A", RequestStatus.RUNNING)


def test_at_every_report_of_an_end_status_and_books_agree() -> None:
    """RequestFinished comes before its blocks are freed, with the final status; BlocksFreed when the table is gone."""
    seen: list[tuple[str, str, int, list[str]]] = []
    engine = Engine(9)
    a = engine.add("A", 5, max_tokens=1)

    def look(event: Event) -> None:
        table = engine.scheduler.kv_cache_manager.get_block_ids("A")[0]
        seen.append((kind_of(event), a.status.name, len(table), engine.running))

    output = engine.scheduler.schedule()
    manager = engine.scheduler.kv_cache_manager
    for holder in (engine.scheduler, manager.coordinator.single_type_managers[0]):
        holder._emit = look
    engine.answer(output)
    assert seen == [
        ("token_sampled", "RUNNING", 2, ["A"]),
        ("request_finished", "FINISHED_LENGTH_CAPPED", 2, []),
        ("blocks_freed", "FINISHED_LENGTH_CAPPED", 0, []),
    ]


def test_reset_preempts_everybody_from_the_back_if_asked() -> None:
    """R1.14."""
    engine = Engine(20)
    engine.add("A", 5)
    engine.add("B", 5, base=50)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.running == ["A", "B"]
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (engine.running, engine.waiting) == ([], ["A", "B"])
    assert len(engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) == 0
    assert engine.step().scheduled_cached_reqs.resumed_req_ids == {"A", "B"}


class TestRefusedAtTheDoor:
    """What could only wait for ever is refused by the call that brings it, and nothing changes."""

    @pytest.mark.parametrize(
        ("add", "sentence"),
        [
            (lambda e: e.add("A", 3), "there is a request 'A' already"),
            (lambda e: e.add("B", 33), "needs 9 blocks for its prompt of 33 tokens, but the pool has 8 usable blocks"),
            (lambda e: e.add("B", 20, max_tokens=14), "needs 9 blocks for 20 prompt tokens and max_tokens 14, but the pool has 8 usable blocks"),
            (lambda e: e.add("B", 64), "prompt of 64 tokens, but with max_model_len 64 at most 63"),
        ],
    )
    def test_refused(self, add: Callable[[Engine], object], sentence: str) -> None:
        engine = Engine(9)
        a = engine.add("A", 3)
        num_events = len(engine.events)
        with pytest.raises(InvalidInput, match=sentence):
            add(engine)
        assert engine.scheduler.requests == {"A": a}
        assert engine.waiting == ["A"]
        assert len(engine.events) == num_events

    def test_the_last_token_needs_no_slot(self) -> None:
        """R7.7: 20 + 13 tokens, of which the last is never computed: exactly the 32 slots of 8 blocks; and it really finishes."""
        engine = Engine(9)
        engine.add("A", 20, max_tokens=13)
        steps = 0
        while engine.scheduler.has_unfinished_requests():
            engine.step()
            steps += 1
        assert steps == 13
        assert engine.of(RequestPreempted) == []

    def test_a_check_changes_nothing(self) -> None:
        engine = Engine(9)
        with pytest.raises(InvalidInput, match="usable blocks"):
            engine.scheduler.check_request(Request("A", range(40)))
        engine.scheduler.check_request(Request("A", range(4)))
        assert engine.scheduler.requests == {}

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs is 0"),
            ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
            ({"max_model_len": 0}, "max_model_len is 0"),
            ({"long_prefill_token_threshold": -1}, "cannot be negative"),
            ({"policy": "fastest"}, "unknown scheduling policy 'fastest': choose one of fcfs, priority"),
            ({"watermark": -0.1}, "watermark is -0.1"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InvalidInput, match=sentence):
            Engine(9, **settings)


def test_without_caching_nothing_is_hashed() -> None:
    """R2.5."""
    engine = Engine(9, enable_caching=False)
    a = engine.add("A", 8)
    engine.step()
    assert a.block_hashes == []
    assert {kind_of(event) for event in engine.events}.isdisjoint({"block_cached", "blocks_touched"})
