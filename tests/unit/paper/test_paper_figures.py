"""The paper's Figures 6 to 10, block by block. Expected ids, fills and reference counts are the paper's; where a drawing's numbers follow no rule, the test
arranges the free queue as a scene does."""

from __future__ import annotations

from engine.paper.config import PaperRequestSpec
from engine.paper.sequence import SequenceStatus
from engine.trace.events import BlocksAllocated, BlocksFreed, CauseKind, CopyQueued, PrefixKept, SequenceForked
from tests.unit.paper.harness import Driven, request

FATHERS, MOTHERS, BROUGHT, FORTH = 1, 2, 3, 4


def slots(driven: Driven, plan_index: int = 0) -> list[int]:
    plan = driven.step()
    sequence = plan.sequences[plan_index]
    positions = range(sequence.num_computed_tokens, sequence.num_computed_tokens + sequence.num_scheduled_tokens)
    return [sequence.block_ids[p // 4] * 4 + p % 4 for p in positions]


def test_figure_6_block_table_translation() -> None:
    """Prompt of 7 tokens in blocks 7 and 1; `fathers` fills block 1; `brought` needs block 3."""
    driven = Driven(request("A", 7, (FATHERS, BROUGHT, FORTH)), num_blocks=9, free_queue_order=(7, 1, 3))
    assert slots(driven) == [28, 29, 30, 31, 4, 5, 6]
    assert (driven.tables(), driven.fills("A")) == ({"A": [7, 1]}, [4, 3])
    assert slots(driven) == [7]
    assert (driven.tables(), driven.fills("A")) == ({"A": [7, 1]}, [4, 4])
    plan = driven.scheduler.schedule()
    assert (plan.sequences[0].block_ids, plan.sequences[0].token_ids[-1]) == ((7, 1, 3), BROUGHT)
    assert (driven.tables(), driven.fills("A")) == ({"A": [7, 1, 3]}, [4, 4, 1])
    assert [event.block_ids for event in driven.log.of(BlocksAllocated, "A")] == [[7, 1], [3]]


def test_figure_7_two_requests() -> None:
    """A: 7, 1, 3 and B: 5, 2, side by side; 0, 4, 6 and 8 stay empty."""
    driven = Driven(request("A", 7, (FATHERS, BROUGHT, FORTH)), request("B", 6, (9, 9, 9)), num_blocks=9, free_queue_order=(7, 1, 5, 2, 3))
    driven.step(2)
    driven.scheduler.schedule()
    assert driven.tables() == {"A": [7, 1, 3], "B": [5, 2]}
    assert (driven.fills("A"), driven.fills("B")) == ([4, 4, 1], [4, 4])
    assert sorted(driven.free()[0]) == [0, 4, 6, 8]


def test_figure_8_parallel_sampling() -> None:
    """The prompt once for both samples; A1 copies block 1 to block 3, ref count 2 → 1, then A2 writes in place."""
    driven = Driven(request("A", 7, (FATHERS, 9), (MOTHERS, 9)), num_blocks=9, free_queue_order=(7, 1, 3))
    driven.step()
    (fork,) = driven.log.of(SequenceForked)
    assert (fork.request_id, fork.parent_id, fork.block_ids) == ("A2", "A1", [7, 1])
    assert fork.cause.kind is CauseKind.PARALLEL_SAMPLING
    assert driven.ref_counts() == {7: 2, 1: 2}
    assert driven.tables() == {"A1": [7, 1], "A2": [7, 1]}
    plan = driven.scheduler.schedule()
    assert plan.copies == ((1, 3),)
    (copy,) = driven.log.of(CopyQueued)
    assert (copy.request_id, copy.source_block_id, copy.destination_block_id, copy.logical_index) == ("A1", 1, 3, 1)
    assert copy.cause.facts == {"logical_index": 1, "ref_cnt": 2}
    assert {s.sequence_id: (s.block_ids, s.token_ids[-1]) for s in plan.sequences} == {"A1": ((7, 3), FATHERS), "A2": ((7, 1), MOTHERS)}
    assert driven.ref_counts() == {7: 2, 3: 1, 1: 1}
    assert (driven.fills("A1"), driven.fills("A2")) == ([4, 4], [4, 4])


def figure_9() -> Driven:
    """Up to the dotted line: four candidates of four full blocks, 0-1-3-5, 0-1-3-6, 0-1-3-7 and 0-2-4-8. Beside those that the drawing shows, the survivors
    are ours: two beams from the prompt, three of one parent at the fourth block."""
    two = ((0, 31), (1, 32))
    four = ((0, 41), (1, 42), (2, 43), (3, 44))
    three_of_one = ((0, 51), (0, 52), (0, 53), (1, 54))
    after = ((1, 61), (1, 62), (2, 63), (2, 64))
    beams = (((0, 21), (0, 22)), *[two] * 7, three_of_one, *[four] * 3, after, four)
    spec = PaperRequestSpec("A", (1, 2, 3, 4), beam_width=4, max_tokens=len(beams), forced_beams=beams)
    return Driven(spec, num_blocks=13)


def test_figure_9_beam_search_before_and_after_the_dotted_line() -> None:
    driven = figure_9()
    driven.step(12)
    assert driven.tables() == {"A1": [0, 1, 3, 5], "A3": [0, 1, 3, 6], "A4": [0, 1, 3, 7], "A2": [0, 2, 4, 8]}
    assert driven.ref_counts() == {0: 4, 1: 3, 3: 3, 5: 1, 6: 1, 7: 1, 2: 1, 4: 1, 8: 1}
    num_before = len(driven.log.of(BlocksFreed))
    driven.step()  # the next survivors all come from candidates 1 and 2
    freed = driven.log.of(BlocksFreed)[num_before:]
    assert sorted(block_id for event in freed for block_id in event.prepended) == [2, 4, 5, 8]
    assert {event.cause.kind for event in freed} == {CauseKind.BEAM_DROPPED}
    statuses = {name: driven.scheduler.sequences[name].status for name in ("A1", "A2")}
    assert set(statuses.values()) == {SequenceStatus.FINISHED_DROPPED}
    driven.manager.arrange_free_queue((9, 10, 11, 12))
    driven.scheduler.schedule()
    tables = driven.tables()
    assert [tables[s.sequence_id] for s in driven.scheduler.running[0].living] == [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]
    assert driven.ref_counts() == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2, 9: 1, 10: 1, 11: 1, 12: 1}
    assert not driven.log.of(CopyQueued)  # all blocks were full: nothing was copied


def test_section_4_4_a_new_token_inside_a_shared_block_copies_that_one_block() -> None:
    """What older systems copy whole, beam search with shared blocks copies by one block, and only where two children write into one partial block."""
    spec = PaperRequestSpec("A", (1, 2, 3, 4, 5), beam_width=2, max_tokens=3, forced_beams=(((0, 21), (0, 22)), ((0, 31), (0, 32)), ((0, 41), (1, 42))))
    driven = Driven(spec, num_blocks=6)
    driven.step()
    assert driven.step().copies == ((1, 2),)  # A1 copies, A2 writes in place
    # Now both survivors come from A1: A2's own block is gone, and A1's is shared again.
    assert driven.ref_counts() == {0: 2, 2: 2}
    assert driven.step().copies == ((2, 1),)


def test_figure_10_shared_prefix() -> None:
    """The prefix is computed once and kept; each request that begins with it shares all its blocks and copies only the last, partial one."""
    prefix = tuple(range(1, 11))  # 10 tokens: two full blocks and half of a third
    driven = Driven(
        PaperRequestSpec("P", prefix, is_prefix=True),
        PaperRequestSpec("A", (*prefix, 50, 51), prefix_id="P", max_tokens=2, forced_token_ids=((60, 61),)),
        PaperRequestSpec("B", (*prefix, 70, 71, 72), prefix_id="P", max_tokens=2, forced_token_ids=((80, 81),)),
        num_blocks=12,
    )
    plan = driven.step()
    assert [(s.sequence_id, s.num_scheduled_tokens, s.draws) for s in plan.sequences] == [("P", 10, ())]
    (kept,) = driven.log.of(PrefixKept)
    assert (kept.request_id, kept.block_ids, kept.cause.facts["num_tokens"]) == ("P", [0, 1, 2], 10)
    plan = driven.scheduler.schedule()
    forks = driven.log.of(SequenceForked)
    assert [(f.request_id, f.parent_id, f.block_ids, f.cause.kind) for f in forks] == [(r, "P", [0, 1, 2], CauseKind.SHARED_PREFIX) for r in "AB"]
    assert plan.copies == ((2, 3), (2, 4))
    assert driven.tables() == {"P": [0, 1, 2], "A": [0, 1, 3], "B": [0, 1, 4, 5]}
    assert driven.ref_counts() == {0: 3, 1: 3, 2: 1, 3: 1, 4: 1, 5: 1}
    assert [(s.sequence_id, s.num_computed_tokens, s.num_scheduled_tokens) for s in plan.sequences] == [("A", 10, 2), ("B", 10, 3)]


def test_figure_10_the_prefix_stays_whoever_comes_and_goes() -> None:
    prefix = tuple(range(1, 9))
    driven = Driven(PaperRequestSpec("P", prefix, is_prefix=True), PaperRequestSpec("A", (*prefix, 50), prefix_id="P", max_tokens=2), num_blocks=6)
    driven.run()
    assert driven.tables() == {"P": [0, 1]}
    assert driven.scheduler.sequences["P"].status is SequenceStatus.PREFIX_KEPT
    driven.scheduler.add_request(PaperRequestSpec("B", (*prefix, 51), prefix_id="P", max_tokens=2))
    plan = driven.step()
    assert (plan.copies, plan.sequences[0].num_computed_tokens, plan.sequences[0].block_ids[:2]) == ((), 8, (0, 1))  # no partial block, no copy


def test_figure_10_the_prefix_has_an_iteration_of_its_own() -> None:
    """Also before requests that do not begin with it, and although there would be room beside it."""
    driven = Driven(request("A", 4, (1, 1)), PaperRequestSpec("P", (1, 2, 3), is_prefix=True), num_blocks=9)
    assert [s.sequence_id for s in driven.step().sequences] == ["P"]
    assert [s.sequence_id for s in driven.step().sequences] == ["A"]
