"""What the worker reports: in the order of R8.6, with the state as the event says, and enough to follow every row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.output import CachedRequestData, NewRequestData, SamplingParams, SchedulerOutput
from engine.errors import EngineError, InvalidInput
from engine.trace.events import AttentionComputed, BlocksCopied, CauseKind, Event, KVWritten, RowUpdated, SlotsMapped, kind_of
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import INTERPRET, ONE_LAYER, TORCH, Driver, make_runner, random_prompt


def of_kind(events: list[Event], kind: type[Event]) -> list[Event]:
    return [e for e in events if isinstance(e, kind)]


def test_r8_6_order_of_a_step_and_what_each_event_says(model: PreTrainedModel) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append, kernel_settings=ONE_LAYER))
    driver.free = [9, 8, 6, 5, 2, 3, 1, 7]
    driver.add("A", [10, 11, 12, 13, 14, 15, 16])
    driver.add("B", [20, 21])
    driver.step({"A": 7, "B": 2})
    assert [(kind_of(e), e.request_id) for e in events] == [
        ("row_updated", "A"), ("row_updated", "B"), ("slots_mapped", "A"), ("slots_mapped", "B"),
        ("kv_written", "A"), ("kv_written", "B"), ("attention_computed", None),
    ]  # fmt: skip
    row, slots, written, attention = events[0], events[2], events[5], events[6]
    assert isinstance(row, RowUpdated)
    assert (row.cause.kind, row.group_id, row.row, row.start, row.block_ids) == (CauseKind.ADDED_TO_BATCH, 0, 0, 0, [7, 1])
    assert isinstance(slots, SlotsMapped)
    assert slots.cause.kind is CauseKind.BLOCK_TABLE_LOOKUP
    assert slots.slots == [28, 29, 30, 31, 4, 5, 6]
    assert (slots.positions, slots.token_ids) == (list(range(7)), [10, 11, 12, 13, 14, 15, 16])
    assert isinstance(written, KVWritten)
    assert written.cause.kind is CauseKind.SLOT_MAPPING
    assert (written.slots, written.token_ids, written.num_layers, written.backend) == ([12, 13], [20, 21], 3, "torch")
    assert isinstance(attention, AttentionComputed)
    assert (attention.cause.kind, attention.cause.facts) == (CauseKind.COMPARED_WITH_REFERENCE, {"layer": 1})
    assert (attention.backend, attention.layers, attention.request_ids) == ("torch", [1], ["A", "B"])
    assert (attention.query_lens, attention.seq_lens) == ([7, 2], [7, 2])
    assert driver.runner.slot_mapping == (28, 29, 30, 31, 4, 5, 6, 12, 13)


def test_a_decode_step_maps_one_slot_and_touches_a_row_only_when_it_grows(model: PreTrainedModel) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append))
    driver.free = [3, 1, 7]
    driver.add("A", random_prompt(7, seed=0))
    driver.step({"A": 7})
    events.clear()
    driver.step({"A": 1})
    assert [kind_of(e) for e in events] == ["slots_mapped", "kv_written", "attention_computed"]
    assert driver.runner.slot_mapping == (7,)
    events.clear()
    driver.step({"A": 1})
    grown = events[0]
    assert isinstance(grown, RowUpdated)
    assert (grown.cause.kind, grown.row, grown.start, grown.block_ids) == (CauseKind.APPENDED, 0, 2, [3])
    attention = events[-1]
    assert isinstance(attention, AttentionComputed)
    assert (attention.query_lens, attention.seq_lens) == ([1], [9])


@pytest.mark.parametrize(
    ("settings", "layers", "compared"), [(TORCH, [], False), (ONE_LAYER, [1], True), (INTERPRET, [0, 1, 2], True)], ids=["torch", "one", "interpret"]
)
def test_the_comparison_is_reported(model: PreTrainedModel, settings: object, layers: list[int], compared: bool) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append, kernel_settings=settings))  # type: ignore[arg-type]
    driver.add("A", random_prompt(9, seed=0))
    driver.step({"A": 9})
    attention = events[-1]
    assert isinstance(attention, AttentionComputed)
    assert attention.layers == layers
    if compared:
        assert attention.agrees_within is not None
        assert 1e-9 <= attention.agrees_within <= 1e-4
    else:
        assert attention.agrees_within is None


def test_a_kernel_that_is_wrong_is_reported_and_its_result_goes_on(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must be able to fail: a Triton kernel that is off by 0.02 in one element shows as 0.1, and the logits move."""
    import engine.worker.attention as attention_module

    good = attention_module.paged_attention
    prompt = random_prompt(9, seed=0)
    honest = Driver(make_runner(model, kernel_settings=ONE_LAYER))
    honest.add("A", prompt)
    honest.step({"A": 9})

    def wrong(*args: object, backend: object, **kwargs: object) -> torch.Tensor:
        output = good(*args, backend=backend, **kwargs)  # type: ignore[arg-type]
        if backend.name == "interpret":  # type: ignore[attr-defined]
            output[-1, 0, 0] += 0.02
        return output

    monkeypatch.setattr(attention_module, "paged_attention", wrong)
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append, kernel_settings=ONE_LAYER))
    driver.add("A", prompt)
    driver.step({"A": 9})
    attention = events[-1]
    assert isinstance(attention, AttentionComputed)
    assert attention.agrees_within == 0.1
    assert not torch.equal(driver.logits["A", 8], honest.logits["A", 8])


def test_rows_can_be_followed_from_the_events_alone(model: PreTrainedModel) -> None:
    """Requests join, grow, sit out, are preempted, resumed and finished; after every event the rows are what the events say."""
    followed: dict[int, tuple[str, tuple[int, ...]]] = {}
    seen: list[tuple[str, CauseKind]] = []
    runner: ModelRunner

    def follow(event: Event) -> None:
        if isinstance(event, RowUpdated):
            assert event.request_id is not None
            seen.append((event.request_id, event.cause.kind))
            for row in [r for r, (req_id, _) in followed.items() if req_id == event.request_id and r != event.row]:
                assert event.cause.facts == {"from_row": row}
                del followed[row]
            if event.cause.kind is CauseKind.LEFT_BATCH:
                del followed[event.row]
            else:
                old = followed[event.row][1] if event.start else ()
                assert len(old) == event.start
                followed[event.row] = (event.request_id, old + tuple(event.block_ids))
        assert {r.row: (r.request_id, r.block_ids[0]) for r in runner.rows()} == followed

    runner = make_runner(model, emit=follow)
    driver = Driver(runner)
    for i, req_id in enumerate("ABCDE"):
        driver.add(req_id, random_prompt(3 + i, seed=i))
    driver.step({"A": 3, "B": 4, "C": 5, "D": 6})
    driver.step({"A": 1, "B": 1, "C": 1, "D": 1})
    driver.finish("B")
    driver.step({"A": 1, "C": 1, "D": 1, "E": 7})  # E takes B's row
    assert [r.request_id for r in runner.rows()] == ["A", "E", "C", "D"]
    driver.finish("A")
    driver.step({"C": 1, "D": 1, "E": 1})  # D, the last, moves into A's row
    assert [r.request_id for r in runner.rows()] == ["D", "E", "C"]
    driver.preempt("E")
    driver.step({"C": 1, "D": 1})
    assert [r.request_id for r in runner.rows()] == ["D", "C"]
    driver.step({"C": 1})  # D sits out
    driver.step({"C": 1, "D": 1, "E": 4})
    driver.step({"C": 1, "D": 1, "E": 5})
    for req_id in "CDE":
        driver.finish(req_id)
    driver.step({})
    assert runner.rows() == ()
    assert runner.requests == {}
    assert {k for _, k in seen} == {CauseKind.ADDED_TO_BATCH, CauseKind.APPENDED, CauseKind.LEFT_BATCH}


def test_r6_7_copies_are_reported_between_rows_and_slots(model: PreTrainedModel) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append))
    driver.add("A", random_prompt(3, seed=0))
    driver.copies = [(5, 6), (7, 8)]
    driver.step({"A": 3})
    copied = events[1]
    assert isinstance(copied, BlocksCopied)
    assert (copied.source_block_ids, copied.destination_block_ids) == ([5, 7], [6, 8])
    assert kind_of(events[2]) == "slots_mapped"


def test_an_empty_step_still_clears_the_rows_of_finished_requests(model: PreTrainedModel) -> None:
    driver = Driver(make_runner(model))
    driver.add("A", random_prompt(3, seed=0))
    driver.step({"A": 3})
    driver.finish("A")
    assert driver.step({}).sampled == {}
    assert (driver.runner.rows(), driver.runner.slot_mapping, driver.runner.last_logits) == ((), (), {})


def test_new_blocks_are_zeroed_when_asked(model: PreTrainedModel) -> None:
    runner = make_runner(model)
    for cache in (*runner.kv_cache.key_caches, *runner.kv_cache.value_caches):
        cache.fill_(3)
    new = NewRequestData("A", [5, 6], ([4],), 0, SamplingParams())
    runner.execute_model(SchedulerOutput([new], CachedRequestData(), {"A": 2}, 2, [0], set(), set(), new_block_ids_to_zero=[4]))
    assert runner.kv_cache.key_caches[0][4, 2:].abs().sum() == 0
    assert runner.kv_cache.key_caches[0][4, :2].abs().sum() > 0
    assert bool((runner.kv_cache.key_caches[0][3] == 3).all())


@pytest.mark.parametrize(
    ("prompt", "params", "bad"), [([5, 97], SamplingParams(), 97), ([-1], SamplingParams(), -1), ([5], SamplingParams(forced_token_ids=(3, 4000)), 4000)]
)
def test_ids_outside_the_vocabulary_are_refused_before_anything_changes(model: PreTrainedModel, prompt: list[int], params: SamplingParams, bad: int) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append))
    driver.add("A", prompt, params)
    with pytest.raises(InvalidInput, match=f"Token id {bad} of request A is outside the model's vocabulary of 97 tokens"):
        driver.step({"A": len(prompt)})
    assert events == []
    assert driver.runner.rows() == ()


def _too_many_tokens(driver: Driver) -> None:
    driver.add("A", random_prompt(20, seed=0))
    driver.step({"A": 20})


def _too_many_requests(driver: Driver) -> None:
    for req_id in "ABC":
        driver.add(req_id, [5])
    driver.step({"A": 1, "B": 1, "C": 1})


def _ahead_of_the_worker(driver: Driver) -> None:
    driver.add("A", [5, 6])
    driver.step({"A": 3})


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (_too_many_tokens, "20 tokens are scheduled, but the worker takes 16 in one step"),
        (_too_many_requests, "3 requests are scheduled, but the block table has 2 rows"),
        (_ahead_of_the_worker, "3 tokens of request A are scheduled from position 0 on, but it has only 2 tokens"),
    ],
)
def test_plans_that_cannot_be_are_refused(model: PreTrainedModel, act: Callable[[Driver], None], sentence: str) -> None:
    driver = Driver(make_runner(model, max_num_seqs=2, max_num_batched_tokens=16))
    with pytest.raises(EngineError, match=sentence):
        act(driver)


def test_forced_tokens_become_the_request_and_are_fed_back(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    from tests.worker.harness import TOLERANCE, dynamic_cache_logits

    driver = Driver(make_runner(model))
    prompt = random_prompt(6, seed=0)
    driver.add("A", prompt, SamplingParams(forced_token_ids=(40, 41)))
    first = driver.step({"A": 6}).sampled["A"][0]
    driver.step({"A": 1})
    driver.step({"A": 1})
    assert driver.requests["A"].token_ids[6:8] == [40, 41]
    assert first.cause.kind is CauseKind.FORCED
    expected = dynamic_cache_logits(reference, [*prompt, 40, 41], 6)
    assert first.cause.facts == {"model_token_id": int(expected[5].argmax())}
    assert float((driver.logits["A", 7] - expected[7]).abs().max()) <= TOLERANCE


def test_a_row_that_was_left_is_zeroed(model: PreTrainedModel) -> None:
    """R8.2: clear_row on leaving, also when nobody takes the row."""
    driver = Driver(make_runner(model))
    driver.add("A", random_prompt(3, seed=0))
    driver.add("B", random_prompt(9, seed=0))
    driver.step({"A": 3, "B": 9})
    driver.finish("B")
    driver.step({"A": 1})
    table = driver.runner.block_table[0]
    assert table.num_blocks_per_row[1] == 0
    assert not table.block_table_np[1].any()


def test_new_requests_take_the_empty_rows_before_resumed_ones(model: PreTrainedModel) -> None:
    """vLLM's _update_states: new requests join before resumed ones, whatever the order of scheduling."""
    driver = Driver(make_runner(model))
    for req_id in "AB":
        driver.add(req_id, random_prompt(3, seed=0))
    driver.step({"A": 3, "B": 3})
    driver.preempt("B")
    driver.step({"A": 1})
    driver.add("C", random_prompt(3, seed=0))
    driver.step({"A": 1, "B": 4, "C": 3})
    assert [r.request_id for r in driver.runner.rows()] == ["A", "C", "B"]


def test_resumed_without_having_left_gets_its_new_table(model: PreTrainedModel) -> None:
    """R8.3: preempted and resumed within one schedule(), so the worker still has the old row when the full new table arrives."""
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append))
    driver.add("A", random_prompt(9, seed=0))
    driver.step({"A": 9})
    old = driver.runner.rows()[0].block_ids[0]
    driver.preempt("A")
    events.clear()
    driver.step({"A": 10})
    new = driver.runner.rows()[0].block_ids[0]
    assert len(new) == 3
    assert new != old
    assert [e.cause.kind for e in events if isinstance(e, RowUpdated)] == [CauseKind.LEFT_BATCH, CauseKind.ADDED_TO_BATCH]


def test_a_resumed_request_has_the_tokens_that_the_scheduler_says(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """CachedRequestData.all_token_ids wins over what the worker sampled itself."""
    from tests.worker.harness import TOLERANCE, dynamic_cache_logits

    driver = Driver(make_runner(model))
    driver.add("A", random_prompt(5, seed=0))
    driver.step({"A": 5})
    driver.step({"A": 1})
    driver.preempt("A")
    request = driver.requests["A"]
    request.token_ids[5:] = [60, 61, 62]
    driver.step({"A": 8})
    expected = dynamic_cache_logits(reference, request.token_ids[:8], 5)
    assert float((driver.logits["A", 7] - expected[7]).abs().max()) <= TOLERANCE
