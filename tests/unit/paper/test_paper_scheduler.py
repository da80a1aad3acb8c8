"""What an iteration holds (section 4.3) and what the worker is told."""

from __future__ import annotations

from engine.paper.config import PaperRequestSpec
from engine.paper.sequence import SequenceStatus
from engine.trace.events import AllocationRefused, CauseKind, RequestAdded, RequestFinished, RequestScheduled, StepScheduled
from tests.unit.paper.harness import Driven, request

OUTPUTS = (1, 2, 3)


def test_prompts_and_single_tokens_share_an_iteration() -> None:
    driven = Driven(request("A", 5, OUTPUTS), num_blocks=9)
    driven.step()
    driven.scheduler.add_request(request("B", 3, OUTPUTS))
    plan = driven.step()
    assert [(s.sequence_id, s.num_computed_tokens, s.num_scheduled_tokens) for s in plan.sequences] == [("A", 5, 1), ("B", 0, 3)]
    assert [e.cause.kind for e in driven.log.of(RequestScheduled)] == [CauseKind.PREFILL, CauseKind.DECODE, CauseKind.PREFILL]
    assert driven.log.of(StepScheduled)[-1].num_scheduled_tokens == {"A": 1, "B": 3}


def test_a_prompt_is_computed_in_one_piece_or_waits() -> None:
    driven = Driven(request("A", 5, OUTPUTS), request("B", 4, OUTPUTS), num_blocks=9, max_num_batched_tokens=8)
    assert [s.sequence_id for s in driven.step().sequences] == ["A"]
    (refused,) = driven.log.of(AllocationRefused)
    assert (refused.request_id, refused.cause.kind, refused.cause.facts) == ("B", CauseKind.PROMPT_TOO_LONG_FOR_STEP, {"num_tokens": 4, "token_budget": 3})
    assert [s.sequence_id for s in driven.step().sequences] == ["A", "B"]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    driven = Driven(request("A", 9, OUTPUTS), request("B", 9, OUTPUTS), request("C", 1, OUTPUTS), num_blocks=5)
    assert [s.sequence_id for s in driven.step().sequences] == ["A"]
    assert [e.request_id for e in driven.log.of(AllocationRefused)] == ["B"]


def test_a_group_has_seats_for_all_that_it_will_be() -> None:
    """Four seats: A will have three sequences, so B's two must wait although A is only one yet; C, which is one, may not overtake."""
    driven = Driven(request("A", 4, OUTPUTS, OUTPUTS, OUTPUTS), request("B", 4, OUTPUTS, OUTPUTS), request("C", 4, OUTPUTS), num_blocks=20, max_num_seqs=4)
    driven.step()
    assert (driven.names("running"), driven.names("waiting")) == (["A"], ["B", "C"])
    driven.step(2)
    assert driven.names("waiting") == ["B", "C"]
    assert [s.sequence_id for s in driven.step().sequences] == ["B1", "C"]  # A has ended


def test_finished_samples_give_their_seats_away() -> None:
    driven = Driven(request("A", 4, (9,), OUTPUTS, stop_token_ids=(9,)), request("B", 4, OUTPUTS), num_blocks=20, max_num_seqs=2)
    driven.step()
    assert driven.scheduler.sequences["A1"].status is SequenceStatus.FINISHED_STOPPED
    assert {s.sequence_id for s in driven.step().sequences} == {"A2", "B"}


def test_every_sample_draws_with_its_own_seed_from_the_prompts_last_position() -> None:
    spec = PaperRequestSpec("A", (1, 2, 3), n=3, max_tokens=2, temperature=0.7, seed=5, stop_token_ids=(9,), forced_token_ids=((4,),))
    driven = Driven(spec, num_blocks=9)
    (prompt,) = driven.step().sequences
    assert prompt.draw_names == ("A1", "A2", "A3")
    assert [params.seed for params in prompt.draws] == [5, 6, 7]
    assert [params.forced_token_ids for params in prompt.draws] == [(4,), (), ()]
    assert {(p.temperature, p.max_tokens, p.stop_token_ids) for p in prompt.draws} == {(0.7, 2, (9,))}
    after = driven.step().sequences
    assert [(s.sequence_id, s.draw_names, s.draws[0].seed, s.num_output_tokens) for s in after] == [
        ("A1", ("A1",), 5, 1),
        ("A2", ("A2",), 6, 1),
        ("A3", ("A3",), 7, 1),
    ]


def test_one_token_is_all_that_some_ask_for() -> None:
    """Nothing is ever written after the prompt, so nothing is copied."""
    driven = Driven(request("A", 7, (1,), (2,)), num_blocks=2)
    assert len(driven.run()) == 1
    assert [(e.request_id, e.reason, e.cause.kind) for e in driven.log.of(RequestFinished)] == [
        ("A1", "length", CauseKind.MAX_TOKENS),
        ("A2", "length", CauseKind.MAX_TOKENS),
    ]
    assert driven.free() == ([1, 0], [])


def test_max_model_len_ends_a_sequence() -> None:
    driven = Driven(request("A", 4, OUTPUTS), num_blocks=9, max_model_len=6)
    driven.run()
    (end,) = driven.log.of(RequestFinished)
    assert (end.cause.kind, end.cause.facts) == (CauseKind.MAX_MODEL_LEN, {"max_model_len": 6})


def test_the_worker_hears_once_of_those_that_are_gone() -> None:
    driven = Driven(request("A", 4, (1,)), request("B", 4, OUTPUTS), num_blocks=9)
    assert [driven.step().finished for _ in range(3)] == [(), ("A",), ()]


def test_a_group_aborted_while_the_model_runs_ignores_the_answer() -> None:
    driven = Driven(request("A", 4, OUTPUTS), num_blocks=9)
    driven.scheduler.schedule()
    driven.scheduler.abort_request("A")
    driven.scheduler.update_from_output({})
    assert not driven.scheduler.has_unfinished_requests()
    assert driven.scheduler.sequences["A"].output_token_ids == []


def test_a_group_is_announced_by_its_first_sequence() -> None:
    driven = Driven(request("A", 4, OUTPUTS, OUTPUTS), request("B", 4, OUTPUTS), num_blocks=20)
    assert [e.request_id for e in driven.log.of(RequestAdded)] == ["A1", "B"]
    driven.step()
    assert list(driven.scheduler.sequences) == ["A1", "B", "A2"]  # in order of birth
