"""Beam search (section 4.4). The rule is transformers' with early_stopping=False: `transformers.generation.utils.GenerationMixin._beam_search`."""

from __future__ import annotations

import math

import pytest

from engine.core.output import SampledToken
from engine.errors import EngineError
from engine.paper.beam_search import Candidate, Hypotheses, num_candidates_per_beam, rank_candidates, select
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import SequenceStatus
from engine.paper.step import SequenceOutput
from engine.trace.events import BeamsChosen, BlocksFreed, Cause, CauseKind, RequestFinished, SequenceForked, TokenSampled
from tests.unit.paper.harness import Driven, Log

STOP = 0


def ends(candidate: Candidate) -> bool:
    return candidate.token_id == STOP


def candidates(*entries: tuple[int, float]) -> list[Candidate]:
    """Of one beam, as (token, cumulative log-probability), best first."""
    return [Candidate(0, token, logprob) for token, logprob in entries]


def test_twice_the_width_is_looked_at_and_more_with_several_stop_tokens() -> None:
    assert [num_candidates_per_beam(4, stops) for stops in (0, 1, 2, 3)] == [8, 8, 12, 16]


def test_sums_are_ranked_over_all_beams_and_ties_go_to_the_better_beam_then_the_lower_token() -> None:
    ranked = rank_candidates([-1.0, -2.0], [{5: -2.0, 4: -2.0, 9: -0.5}, {7: -1.0}], 3)
    assert [(c.parent, c.token_id, c.cumulative_logprob) for c in ranked] == [(0, 9, -1.5), (0, 4, -3.0), (0, 5, -3.0)]


def test_an_ending_candidate_counts_only_among_the_best_width() -> None:
    chosen = select(candidates((STOP, -1.0), (1, -2.0), (STOP, -3.0), (2, -4.0)), Hypotheses[str](2, 1.0), ends, 1, False)
    assert (chosen.finished, chosen.running, chosen.is_over) == ([0], [1, 3], False)


def test_the_search_is_over_when_no_running_beam_beats_the_worst_of_a_full_list() -> None:
    """Two finished with -1 and -2; the best running one has -2.5: even now, divided by its present length, it is worse."""
    hypotheses = Hypotheses[str](2, 0.0)
    hypotheses.add(-1.0, "a")
    chosen = select(candidates((STOP, -2.0), (1, -2.5), (2, -2.6)), hypotheses, ends, 3, False)
    assert (chosen.finished, chosen.running, chosen.is_over) == ([0], [], True)


def test_a_running_beam_that_is_only_as_good_as_the_worst_finished_one_does_not_go_on() -> None:
    hypotheses = Hypotheses[str](2, 0.0)
    hypotheses.add(-1.0, "a")
    assert select(candidates((STOP, -2.5), (1, -2.5)), hypotheses, ends, 3, False).is_over


def test_with_a_length_penalty_the_same_beam_may_still_win() -> None:
    """-2.5 / 3 outputs is better than -1.0 / 1."""
    hypotheses = Hypotheses[str](2, 1.0)
    hypotheses.add(hypotheses.score(-1.0, 1), "a")
    chosen = select(candidates((STOP, -2.0), (1, -2.5), (2, -2.6)), hypotheses, ends, 3, False)
    assert (chosen.finished, chosen.running, chosen.is_over) == ([0], [1, 2], False)


def test_a_finished_beam_that_is_worse_than_a_full_list_is_not_kept() -> None:
    hypotheses = Hypotheses[str](2, 0.0)
    for score, name in ((-1.0, "a"), (-1.5, "b")):
        hypotheses.add(score, name)
    assert hypotheses.accepts([-2.0]) == [False]
    assert hypotheses.accepts([-1.2, -1.1]) == [False, True]
    hypotheses.add(-1.2, "c")
    assert hypotheses.entries == [(-1.0, "a"), (-1.2, "c")]


def test_at_the_last_token_the_best_width_end_and_nobody_goes_on() -> None:
    chosen = select(candidates((1, -1.0), (2, -2.0), (3, -3.0)), Hypotheses[str](2, 1.0), ends, 4, True)
    assert (chosen.finished, chosen.running, chosen.is_over) == ([0, 1], [], False)


# ------------------------------------------------------------------ what it does to sequences and blocks


class Beams:
    """One group of width 2 over a table of log-probabilities: after a sequence's last output, this token -> probability."""

    def __init__(self, after: dict[int | None, dict[int, float]], max_tokens: int = 3, **more: object) -> None:
        self.after = after
        self.log = Log()
        self.scheduler = PaperScheduler(PaperConfig(num_blocks=12, block_size=2), self.log)
        self.log.scheduler = self.scheduler
        self.scheduler.add_request(PaperRequestSpec("A", (9, 9, 9), beam_width=2, max_tokens=max_tokens, **more))  # type: ignore[arg-type]
        self.group = self.scheduler.groups["A"]

    def step(self) -> None:
        plan = self.scheduler.schedule()
        outputs = {}
        for sequence in plan.sequences:
            last = sequence.token_ids[-1] if sequence.num_output_tokens else None
            outputs[sequence.sequence_id] = SequenceOutput((), {token: math.log(p) for token, p in self.after[last].items()})
        self.scheduler.update_from_output(outputs)


def test_the_best_child_goes_on_in_its_parent_and_the_next_is_a_fork() -> None:
    beams = Beams({None: {1: 0.6, 2: 0.4}, 1: {3: 0.5, 4: 0.5}, 2: {3: 0.2, 4: 0.1}, 3: {5: 1.0}, 4: {5: 1.0}})
    beams.step()
    assert [(s.sequence_id, s.output_token_ids, s.parent_id) for s in beams.group.living] == [("A1", [1], None), ("A2", [2], "A1")]
    beams.step()  # both best children are A1's: 0.3 and 0.3 against 0.08
    assert [(s.sequence_id, s.output_token_ids, s.parent_id) for s in beams.group.living] == [("A1", [1, 3], None), ("A3", [1, 4], "A1")]
    a2 = beams.scheduler.sequences["A2"]
    assert (a2.status, a2.output_token_ids) == (SequenceStatus.FINISHED_DROPPED, [2])
    (freed,) = beams.log.of(BlocksFreed, "A2")
    assert freed.cause == Cause(CauseKind.BEAM_DROPPED, {"beam_width": 2})
    chosen = beams.log.of(BeamsChosen)[1]
    assert [(c.parent_id, c.token_id, c.sequence_id) for c in chosen.candidates] == [("A1", 3, "A1"), ("A1", 4, "A3"), ("A2", 3, None), ("A2", 4, None)]
    assert [c.cumulative_logprob for c in chosen.candidates] == pytest.approx([math.log(p) for p in (0.3, 0.3, 0.08, 0.04)])
    order = [type(e) for e in beams.log.events if e.request_id in ("A2", "A3") and isinstance(e, SequenceForked | RequestFinished | BlocksFreed | TokenSampled)]
    assert order[-4:] == [SequenceForked, RequestFinished, BlocksFreed, TokenSampled]


def test_a_finished_beam_frees_its_blocks_and_the_group_goes_on() -> None:
    beams = Beams({None: {1: 0.6, STOP: 0.4}, 1: {3: 0.9, 4: 0.1}, 3: {5: 1.0}, 4: {5: 1.0}}, stop_token_ids=(STOP,))
    beams.step()
    assert [(s.sequence_id, s.output_token_ids) for s in beams.group.living] == [("A1", [1])]
    stopped = beams.scheduler.sequences["A2"]
    assert (stopped.status, stopped.output_token_ids, stopped.parent_id) == (SequenceStatus.FINISHED_STOPPED, [STOP], "A1")
    assert beams.scheduler.block_manager.block_ids("A2") == ()
    assert beams.log.of(RequestFinished, "A2")[0].cause.kind is CauseKind.STOP_TOKEN
    for _ in range(2):
        beams.step()
    assert not beams.scheduler.has_unfinished_requests()
    assert [(s.sequence_id, s.output_token_ids) for s in beams.group.results()] == [("A1", [1, 3, 5])]  # n = 1: the best one
    assert beams.group.hypotheses is not None
    # The third, 0.06 over 3 outputs, is worse than the 0.4 that stopped after one.
    assert [(score, s.sequence_id) for score, s in beams.group.hypotheses.entries] == [
        (pytest.approx(math.log(0.54) / 3), "A1"),
        (pytest.approx(math.log(0.4)), "A2"),
    ]


def test_when_the_search_is_over_the_running_beams_are_dropped_with_that_cause() -> None:
    beams = Beams({None: {STOP: 0.5, 1: 0.5}, 1: {STOP: 0.9, 2: 0.05, 3: 0.05}}, max_tokens=9, length_penalty=0.0, stop_token_ids=(STOP,))
    beams.step()
    beams.step()  # finished with 0.5 and 0.45; nothing that goes on can beat them
    assert not beams.scheduler.has_unfinished_requests()
    assert {s.status for s in beams.group.results()} == {SequenceStatus.FINISHED_STOPPED}
    assert beams.scheduler.block_manager.gpu_allocator.num_free_blocks == 12


def test_forced_survivors_carry_the_models_log_probabilities_and_are_marked() -> None:
    forced = (((0, 7), (0, 2)),)
    beams = Beams({None: {1: 0.6, 2: 0.4, 7: 0.01}, 7: {3: 0.5, 4: 0.5}, 2: {3: 0.2, 4: 0.1}, 3: {5: 1.0}}, forced_beams=forced)
    plan = beams.scheduler.schedule()
    assert plan.sequences[0].token_ids_asked == (7, 2)
    beams.scheduler.update_from_output({"A1": SequenceOutput((), {1: math.log(0.6), 2: math.log(0.4), 7: math.log(0.01)})})
    assert [(s.output_token_ids, s.forced, s.cumulative_logprob) for s in beams.group.living] == [
        ([7], [3], pytest.approx(math.log(0.01))),
        ([2], [3], pytest.approx(math.log(0.4))),
    ]
    (chosen,) = beams.log.of(BeamsChosen)
    assert [(c.token_id, c.forced, c.sequence_id) for c in chosen.candidates] == [(7, True, "A1"), (2, True, "A2"), (1, False, None)]
    assert [e.cause for e in beams.log.of(TokenSampled)] == [Cause(CauseKind.FORCED, {"model_token_id": 1})] * 2


def test_what_the_model_would_have_said_is_asked_of_the_beam_itself() -> None:
    """The forced beam is so improbable that none of its continuations is among those looked at; its own most probable token is 6 all the same."""
    forced = (((0, 1), (0, 7)), ((0, 2), (1, 8)))
    after = {None: {1: 0.9, 2: 0.05, 7: 1e-9}, 1: dict.fromkeys(range(2, 7), 0.2), 7: {6: 0.9, 8: 0.1}, 2: {3: 1.0}, 8: {3: 1.0}}
    beams = Beams(after, forced_beams=forced)
    beams.step()
    beams.step()
    assert beams.log.of(TokenSampled)[-1].cause.facts == {"model_token_id": 6}


def test_without_a_model_forced_beams_have_no_log_probabilities_and_end_at_max_tokens() -> None:
    spec = PaperRequestSpec("A", (9, 9), beam_width=2, n=2, max_tokens=2, forced_beams=(((0, 1), (0, 2)), ((1, 3), (0, 4))))
    driven = Driven(spec, num_blocks=5)
    driven.run()
    group = driven.scheduler.groups["A"]
    assert [(s.output_token_ids, s.status, s.cumulative_logprob) for s in group.results()] == [
        ([2, 3], SequenceStatus.FINISHED_LENGTH_CAPPED, None),
        ([1, 4], SequenceStatus.FINISHED_LENGTH_CAPPED, None),
    ]


def test_nothing_decides_without_a_model_and_without_forced_beams() -> None:
    driven = Driven(PaperRequestSpec("A", (9, 9), beam_width=2, max_tokens=2), num_blocks=5)
    with pytest.raises(EngineError, match="nothing says which beams go on after 0 tokens"):
        driven.step()


def test_a_worker_that_does_not_answer_is_named() -> None:
    scheduler = PaperScheduler(PaperConfig(5, 4))
    scheduler.add_request(PaperRequestSpec("A", (9, 9), n=2, max_tokens=2))
    scheduler.schedule()
    with pytest.raises(EngineError, match="asked for A1 and did not answer"):
        scheduler.update_from_output({})
    scheduler.add_request(PaperRequestSpec("B", (9, 9), n=2, max_tokens=2))
    scheduler.schedule()
    with pytest.raises(EngineError, match="2 sequences, but the worker sampled 1"):
        scheduler.update_from_output({"B1": SequenceOutput((SampledToken(1, Cause(CauseKind.GREEDY)),))})
