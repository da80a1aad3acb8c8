"""Random lives of sequences: unshared logits throughout, and the same rows, slots, writes and copies with and without a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from transformers import PreTrainedModel

from engine.core.output import SamplingParams
from engine.paper.config import PaperConfig
from engine.paper.step import IterationPlan
from engine.paper_bookkeeping import PaperBookkeepingRunner
from engine.trace.events import AttentionComputed, CauseKind, Event, KVWritten, RowUpdated, kind_of
from tests.worker.hand_made_groups import HandMadeGroups, make_sequence_runner, worst_difference
from tests.worker.harness import TOLERANCE, random_prompt


def as_data(events: list[Event]) -> list[dict[str, Any]]:
    """Everything but what only a model has."""
    told = [(kind_of(e), msgspec.to_builtins(e)) for e in events if not isinstance(e, AttentionComputed)]
    return [{"kind": kind, **{k: v for k, v in data.items() if k not in ("num_layers", "backend")}} for kind, data in told]


def random_life(groups: HandMadeGroups, dice: random.Random) -> Iterator[IterationPlan]:
    """Arrivals, forks, drops, swaps and recomputations, with decodes between them: the plan of each iteration that ran."""
    for born in range(40):
        while len(groups.free) < 20:
            groups.drop(max(groups.sequences, key=lambda name: len(groups.sequences[name].block_ids)))
        here = [name for name, s in groups.sequences.items() if not s.cpu_block_ids]
        away = [name for name, s in groups.sequences.items() if s.cpu_block_ids]
        choice = dice.choice(("add", "fork", "fork", "drop", "swap", "return", "recompute", "nothing"))
        if choice == "add" and len(here) < 8:
            groups.add(f"S{born}", random_prompt(dice.randint(1, 14), seed=born))
        elif choice == "fork" and here and len(here) < 8:
            parent = dice.choice(here)
            groups.fork(parent, f"S{born}", SamplingParams(max_tokens=64, temperature=2.0, seed=born))
        elif choice == "drop" and here:
            groups.drop(dice.choice(here))
        elif choice == "swap" and here and not away:
            groups.swap_out(dice.sample(here, dice.randint(1, len(here))))
        elif choice == "return" and away:
            groups.swap_in(away)
        elif choice == "recompute" and here:
            groups.recompute(dice.choice(here))
        groups.step()
        yield groups.plans[-1]


def test_random_lives(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    copies = swaps = 0
    causes = set()
    for seed in range(5):
        events: list[Event] = []
        runner = make_sequence_runner(model, emit=events.append)
        groups = HandMadeGroups(runner, seed=seed)
        without_model: list[Event] = []
        bookkeeping = PaperBookkeepingRunner(PaperConfig(num_blocks=64, block_size=4), without_model.append)
        for plan in random_life(groups, random.Random(seed)):
            assert worst_difference(runner, plan, reference) <= TOLERANCE
            bookkeeping.execute(replace(plan, sequences=tuple(replace(s, draws=(), draw_names=()) for s in plan.sequences)))
            assert (bookkeeping.rows(), bookkeeping.slot_mapping) == (runner.rows(), runner.slot_mapping)
            copies += len(plan.copies)
            swaps += len(plan.swap_in)
        assert as_data(events) == as_data(without_model)
        assert {e.backend for e in without_model if isinstance(e, KVWritten)} == {"none"}
        causes |= {e.cause.kind for e in events if isinstance(e, RowUpdated)}
    assert copies > 10
    assert swaps > 10
    assert causes == {CauseKind.ADDED_TO_BATCH, CauseKind.APPENDED, CauseKind.LEFT_BATCH, CauseKind.SHARED_BLOCK_WRITTEN}
