"""Who gives way, how, and who comes back (section 4.5, and vLLM's first release where the paper leaves it open)."""

from __future__ import annotations

from engine.paper.config import PaperRequestSpec
from engine.paper.sequence import SequenceStatus
from engine.trace.events import (
    AllocationRefused,
    BlocksFreed,
    BlocksSwappedIn,
    BlocksSwappedOut,
    BlocksTouched,
    CauseKind,
    RequestAdmitted,
    RequestPreempted,
    RequestScheduled,
)
from tests.unit.paper.harness import Driven, request

OUTPUTS = (1, 2, 3, 4, 5, 6)


def three_full(**config: object) -> Driven:
    """A, B and C, each with a full block of prompt, in a pool that has one block to spare: A's second token takes it, B's makes C give way."""
    return Driven(*(request(name, 4, OUTPUTS) for name in "ABC"), num_blocks=4, **config)


def test_the_last_to_arrive_gives_way_and_waits_in_front_of_later_ones() -> None:
    driven = three_full()
    driven.scheduler.add_request(request("D", 4, OUTPUTS))
    driven.step()
    assert (driven.names("running"), driven.names("waiting")) == (["A", "B", "C", "D"], [])
    driven.step()
    preempted = driven.log.of(RequestPreempted)
    assert [event.request_id for event in preempted] == ["D", "C"]
    assert {(event.cause.kind, event.cause.facts["for_request"]) for event in preempted} == {(CauseKind.LAST_RUNNING, "A"), (CauseKind.LAST_RUNNING, "B")}
    assert (driven.names("running"), driven.names("waiting")) == (["A", "B"], ["C", "D"])
    assert driven.scheduler.sequences["C"].status is SequenceStatus.PREEMPTED
    assert driven.scheduler.sequences["C"].num_preemptions == 1


def test_nobody_is_admitted_in_an_iteration_that_preempted() -> None:
    driven = three_full()
    driven.step()
    driven.scheduler.add_request(request("E", 1, (9,)))
    plan = driven.step()
    assert [s.sequence_id for s in plan.sequences] == ["A", "B"]
    assert driven.names("waiting") == ["C", "E"]


def test_recomputation_takes_prompt_and_outputs_as_one_prompt() -> None:
    driven = three_full()
    driven.step(2)
    freed = [event for event in driven.log.of(BlocksFreed, "C") if event.cause.kind is CauseKind.RECOMPUTED]
    assert [(event.block_ids, event.cause.facts) for event in freed] == [([2], {"num_tokens": 5})]
    assert driven.scheduler.sequences["C"].num_computed_tokens == 0
    plans = driven.run()
    again = next(s for plan in plans for s in plan.sequences if s.sequence_id == "C")
    assert (again.num_computed_tokens, again.num_scheduled_tokens, again.num_prompt_tokens, again.num_output_tokens) == (0, 5, 4, 1)
    assert [event.resumed for event in driven.log.of(RequestAdmitted, "C")] == [False, True]
    assert driven.scheduler.sequences["C"].output_token_ids == list(OUTPUTS)


def test_mode_auto_swaps_several_and_recomputes_one() -> None:
    driven = Driven(request("A", 4, OUTPUTS), request("B", 4, OUTPUTS[:4], OUTPUTS[:4]), num_blocks=4, num_cpu_blocks=9)
    driven.step(2)
    (out,) = driven.log.of(BlocksSwappedOut)
    assert (out.request_id, out.gpu_block_ids, out.cpu_block_ids, out.prepended) == ("B", [1], [0], [1])
    assert out.cause.facts == {"num_blocks": 1, "num_cpu_free": 9}
    assert driven.names("swapped") == ["B"]
    single = three_full(num_cpu_blocks=9)
    single.step(2)
    assert (single.names("swapped"), single.names("waiting")) == ([], ["C"])


def test_mode_swap_swaps_one_too_and_its_progress_is_kept() -> None:
    driven = three_full(num_cpu_blocks=1, preemption_mode="swap")
    driven.step(2)
    assert (driven.names("swapped"), driven.tables()["C"]) == (["C"], [0])
    assert driven.scheduler.sequences["C"].num_computed_tokens == 4
    (preempted,) = driven.log.of(RequestPreempted)
    assert preempted.num_lost_tokens == 0
    plans = driven.run()
    back = next(plan for plan in plans if plan.swap_in)
    (event,) = driven.log.of(BlocksSwappedIn)
    assert (back.swap_in, event.cause.kind) == (((0, event.gpu_block_ids[0]),), CauseKind.SWAPPED_BACK)
    assert next(s for s in back.sequences if s.sequence_id == "C").num_scheduled_tokens == 1


def test_swap_space_exhausted_means_recomputation_with_that_cause() -> None:
    driven = Driven(request("A", 4, OUTPUTS), request("B", 8, OUTPUTS, OUTPUTS), num_blocks=6, num_cpu_blocks=1)
    driven.run()
    assert not driven.log.of(BlocksSwappedOut)
    assert driven.log.of(RequestPreempted, "B")
    freed = [event for event in driven.log.of(BlocksFreed) if event.cause.kind is CauseKind.SWAP_SPACE_EXHAUSTED]
    assert {event.request_id for event in freed} == {"B1", "B2"}
    assert [event.cause.facts for event in freed] == [{"num_blocks": 4, "num_cpu_free": 1}] * 2
    assert all(sequence.output_token_ids == list(OUTPUTS) for sequence in driven.scheduler.sequences.values())


def test_a_group_gives_way_as_a_whole_also_when_it_is_the_one_in_need() -> None:
    """B's two samples need a copy and there is no block: B itself is the last, so all of B goes; A is not touched."""
    driven = Driven(request("A", 4, (1,) * 9), request("B", 7, (5, 6), (7, 8)), num_blocks=4, num_cpu_blocks=9)
    driven.step()
    assert driven.ref_counts() == {0: 1, 1: 2, 2: 2}
    plan = driven.step()  # A takes the last free block; B's copy has none
    assert [s.sequence_id for s in plan.sequences] == ["A"]
    refused = driven.log.of(AllocationRefused, "B")[0]
    assert refused.cause.kind is CauseKind.ONE_BLOCK_PER_SEQUENCE
    assert refused.cause.facts == {"num_sequences": 2, "num_required": 1, "num_free": 0}
    assert plan.swap_out == ((1, 0), (2, 1))
    assert plan.copies == ()
    assert {driven.scheduler.sequences[name].status for name in ("B1", "B2")} == {SequenceStatus.SWAPPED}
    assert driven.manager.block_ids("B1") == driven.manager.block_ids("B2") == (0, 1)


def test_swapped_groups_come_back_first_and_until_then_nobody_is_admitted() -> None:
    driven = Driven(request("A", 4, (1,) * 6), request("B", 7, (5, 6), (7, 8)), num_blocks=4, num_cpu_blocks=9)
    driven.step(2)
    driven.scheduler.add_request(request("C", 1, (9,)))
    driven.step()
    refused = driven.log.of(AllocationRefused, "C")[0]
    assert (refused.cause.kind, refused.cause.facts) == (CauseKind.PREEMPTED_FIRST, {"num_swapped": 1})
    assert driven.log.of(AllocationRefused, "B")[-1].cause.kind is CauseKind.INSUFFICIENT_BLOCKS
    driven.run()
    order = [event.request_id for event in driven.log.of(RequestAdmitted)]
    assert order == ["A", "B1", "B", "C"]


def test_sharing_survives_the_swap_and_the_copy_comes_after_the_return() -> None:
    """Both samples still share everything when they are swapped; back again, the first to write copies."""
    driven = Driven(request("A", 4, (1,) * 3), request("B", 7, (5, 6), (7, 8)), num_blocks=4, num_cpu_blocks=9)
    plans = driven.run()
    (swapped_in,) = driven.log.of(BlocksSwappedIn)
    back = next(plan for plan in plans if plan.swap_in)
    assert len(back.swap_in) == 2
    ((source, destination),) = back.copies
    assert source in swapped_in.gpu_block_ids
    assert {s.sequence_id: s.block_ids[-1] for s in back.sequences} == {"B1": destination, "B2": source}


def test_recomputing_a_group_shares_the_prompt_again() -> None:
    driven = Driven(request("A", 4, (1,) * 9), request("B", 8, OUTPUTS, (9, 8, 7, 6, 5, 4)), num_blocks=7, preemption_mode="recompute")
    driven.run()
    assert driven.log.of(RequestPreempted, "B")
    (touched,) = driven.log.of(BlocksTouched)[:1]
    assert (touched.request_id, touched.cause.kind, touched.cause.facts) == ("B2", CauseKind.SAME_TOKENS, {"other": "B1", "num_tokens": 8})
    assert len(touched.block_ids) == 2
    assert [s.output_token_ids for s in driven.scheduler.groups["B"].sequences] == [list(OUTPUTS), [9, 8, 7, 6, 5, 4]]


def test_a_recomputation_larger_than_an_iteration_goes_on_over_several() -> None:
    """9 tokens of budget, more to compute again: in pieces, and both samples get their next token in one iteration."""
    driven = Driven(
        request("A", 4, (1,) * 9), request("B", 5, OUTPUTS, (9, 8, 7, 6, 5, 4)), num_blocks=6, max_num_batched_tokens=9, preemption_mode="recompute"
    )
    plans = driven.run()
    cut = [event for event in driven.log.of(RequestScheduled) if event.cause.kind is CauseKind.CHUNKED_BY_BUDGET]
    assert cut
    assert all(sum(s.num_scheduled_tokens for s in plan.sequences) <= 9 for plan in plans)
    drawing = [{s.sequence_id for s in plan.sequences if s.draws and s.sequence_id in ("B1", "B2")} for plan in plans]
    assert {frozenset(names) for names in drawing} <= {frozenset(), frozenset({"B1"}), frozenset({"B1", "B2"})}
    assert [s.output_token_ids for s in driven.scheduler.groups["B"].sequences] == [list(OUTPUTS), [9, 8, 7, 6, 5, 4]]


def test_the_watermark_is_kept_beside_running_groups_only() -> None:
    """One of 5 blocks is kept back for those that run; a group that is alone may use it."""
    driven = Driven(request("A", 12, (1, 1)), request("B", 8, (1, 1)), num_blocks=5, watermark=0.2)
    driven.step()
    refused = driven.log.of(AllocationRefused, "B")[0]
    assert (refused.cause.facts["num_required"], refused.cause.facts["num_watermark"], refused.cause.facts["num_free"]) == (2, 1, 2)
    alone = Driven(request("A", 20, (1,)), num_blocks=5, watermark=0.2)
    assert alone.step().sequences[0].num_scheduled_tokens == 20


def test_an_aborted_group_leaves_nothing_wherever_it_was() -> None:
    driven = Driven(request("A", 4, (1,) * 9), request("B", 7, (5, 6), (7, 8)), num_blocks=4, num_cpu_blocks=9)
    driven.step(2)
    assert driven.names("swapped") == ["B"]
    driven.scheduler.abort_request("B")
    assert driven.manager.cpu_allocator.num_free_blocks == 9
    driven.scheduler.abort_request("B")  # a second time nothing happens
    driven.scheduler.add_request(PaperRequestSpec("C", (1, 2, 3), max_tokens=1))
    driven.scheduler.abort_request("C")
    driven.scheduler.abort_request("A")
    assert not driven.scheduler.has_unfinished_requests()
    assert driven.tables() == {}
    assert {s.status for s in driven.scheduler.sequences.values()} == {SequenceStatus.FINISHED_ABORTED}
    assert set(driven.scheduler.schedule().finished) == {"A", "B1", "B2", "C"}
