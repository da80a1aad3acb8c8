"""Sliding windows that really let blocks go: `tiny-swa` in its three groups, against transformers, while what was let go is spoilt and used by others.

With caching off a page becomes not-a-number the moment its block leaves a window; with caching on it still serves hits, so it is spoilt when it is handed out
again. Either way a kernel that reads a slot too many says something else than transformers.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.sliding_window_manager import SlidingWindowManager
from engine.errors import EngineError, InvalidInput
from engine.group_config import group_specs
from engine.models import kv_cache_groups_of, load_model
from engine.models.tiny_tokenizer import read_passages
from engine.trace.events import AttentionComputed, BlocksAllocated, BlocksSkipped, Event, PrefixLookup, RequestPreempted
from engine.worker.attention import ForwardContext
from engine.worker.kernel_settings import KernelSettings, choose_kernel_settings
from engine.worker.model_runner import ModelRunner
from tests.worker.engine_loop import EngineLoop
from tests.worker.harness import TOLERANCE, TORCH, Driver, dynamic_cache_generation, dynamic_cache_logits, untouched_copy

BLOCK_SIZE = 4
PASSAGES = read_passages()


def tokens_of(title: str) -> list[int]:
    return load_model("tiny-swa").tokenizer.encode(PASSAGES[title])


@cache
def reference() -> PreTrainedModel:
    torch.set_num_threads(1)
    return untouched_copy(load_model("tiny-swa").model)


@cache
def continuation(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return dynamic_cache_generation(reference(), list(prompt), num_tokens)


@cache
def cached_logits(token_ids: tuple[int, ...], num_prompt_tokens: int) -> torch.Tensor:
    return dynamic_cache_logits(reference(), list(token_ids), num_prompt_tokens)


class WindowEngine(EngineLoop):
    """On the groups that the model's layers ask for."""

    def __init__(
        self,
        *,
        num_blocks: int = 96,
        budget: int = 256,
        caching: bool = True,
        settings: KernelSettings | None = None,
        model: str = "tiny-swa",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        loaded = load_model(model)
        self.skipped_by: dict[int, str | None] = {}
        """Block that left a window -> who let it go, until it is handed out again."""
        self.inherited: list[tuple[str | None, str | None]] = []
        """(who let a block go, who got it), in the order of getting."""
        super().__init__(
            loaded.model,
            group_specs(kv_cache_groups_of(model, block_size), block_size),
            num_blocks=num_blocks,
            budget=budget,
            max_model_len=1024,
            caching=caching,
            settings=settings or choose_kernel_settings("torch", (), num_layers=loaded.shape["num_layers"]),
        )

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, BlocksSkipped):
            self.skipped_by |= dict.fromkeys(event.block_ids, event.request_id)
            if not self.caching:
                self.spoil(event.block_ids)
        elif isinstance(event, BlocksAllocated):
            self.inherited += [(self.skipped_by.pop(block_id), event.request_id) for block_id in event.block_ids if block_id in self.skipped_by]
            self.spoil(event.block_ids)

    def assert_same_as_transformers(self) -> None:
        self.assert_says(
            lambda request: (
                continuation(tuple(request.prompt_token_ids), request.sampling_params.max_tokens),
                cached_logits(tuple(request.all_token_ids), request.num_prompt_tokens),
            )
        )


def gettysburg_and_others(engine: WindowEngine) -> None:
    """A runs over 120 tokens; B comes while A's window moves, C has A's prompt once more, D comes last. The pool is no larger than it takes, so they live on
    what A's windows let go."""
    speech, tale, whale = tokens_of("gettysburg-address"), tokens_of("a-tale-of-two-cities"), tokens_of("moby-dick")
    engine.add("A", speech[:44], 80)
    engine.run(20)
    engine.add("B", tale[:21], 30)
    engine.run(16)
    engine.add("C", speech[:44], 9)
    engine.add("D", whale[:30], 24)
    engine.run()


def run_and_compare(engine: WindowEngine) -> None:
    gettysburg_and_others(engine)
    engine.assert_same_as_transformers()


@pytest.mark.parametrize(
    ("budget", "caching", "layers"),
    [(16, True, (0, 2)), (16, False, (0, 2)), (256, True, (0, 2)), (256, False, (0, 2)), (16, False, "all"), (256, True, "all")],
    ids=lambda value: {True: "caching", False: "no caching", 16: "chunks", 256: "one shot"}.get(value) if not isinstance(value, tuple) else "layers 0 and 2",
)
def test_what_windows_let_go_is_spoilt_and_reused_and_every_logit_is_that_of_transformers(budget: int, caching: bool, layers: tuple[int, ...]) -> None:
    """Layer 0 has a window, layer 2 has not; they, or all six, run through Triton's interpreter."""
    settings = choose_kernel_settings("torch", layers, num_layers=6)
    engine = WindowEngine(num_blocks=72, budget=budget, caching=caching, settings=settings)
    gettysburg_and_others(engine)
    assert sorted(engine.finished) == ["A", "B", "C", "D"]
    assert engine.finished["A"].num_tokens == 124
    assert ("A", "B") in engine.inherited, "no block of A's windows went to B"
    engine.assert_same_as_transformers()
    bounds = [e.agrees_within for e in engine.events if isinstance(e, AttentionComputed)]
    assert all(bound is not None and bound <= 1e-5 for bound in bounds)


def test_a_hit_adopts_the_tail_of_each_window_and_everything_of_the_full_group() -> None:
    """44 tokens, of which the last must be computed: ten blocks are found, and of a window of 8 the two before position 40 are enough (R3.20, R4.4)."""
    engine = WindowEngine(num_blocks=200)
    speech = tokens_of("gettysburg-address")
    engine.add("A", speech[:44], 80)
    engine.run(20)
    engine.add("C", speech[:44], 12)
    engine.step()
    assert [e.num_hit_tokens for e in engine.events if isinstance(e, PrefixLookup) and e.request_id == "C"] == [40]
    first, second, full = engine.tables("C")
    assert [len([b for b in table[:10] if b]) for table in (first, second, full)] == [2, 2, 10]
    assert first[8:10] != second[8:10]
    engine.run()
    engine.assert_same_as_transformers()


def test_640_tokens_in_a_pool_for_which_full_attention_alone_would_be_too_large() -> None:
    """The prompt in chunks of 48, then 40 tokens. Three full groups would need 3 * 160 blocks; two windows and one full group need 160 and a few."""
    prompt = list(chain.from_iterable([*tokens_of(title), 0] for title in PASSAGES))[:600]
    engine = WindowEngine(num_blocks=200, budget=48, caching=False)
    engine.add("A", prompt, 40)
    engine.run()
    assert engine.finished["A"].num_tokens == 640
    assert ("A", "A") in engine.inherited
    assert not any(isinstance(e, RequestPreempted) for e in engine.events)
    engine.assert_same_as_transformers()


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_pool_that_is_too_small_preempts_and_still_says_the_same(caching: bool) -> None:
    """A preempted request loses the blocks of all groups and computes again what it cannot find in the cache."""
    engine = WindowEngine(num_blocks=36, budget=32, caching=caching)
    engine.add("A", tokens_of("gettysburg-address")[:30], 40)
    engine.add("B", tokens_of("a-tale-of-two-cities")[:21], 40)
    engine.add("C", tokens_of("moby-dick")[:18], 30)
    engine.run()
    assert sorted(engine.finished) == ["A", "B", "C"]
    assert any(isinstance(e, RequestPreempted) for e in engine.events)
    engine.assert_same_as_transformers()


def test_a_plain_forward_pass_agrees_as_well() -> None:
    """The other reference: no cache at all, the whole text at once."""
    engine = WindowEngine(budget=16)
    engine.add("A", tokens_of("gettysburg-address")[:44], 80)
    engine.run()
    with torch.inference_mode():
        expected = reference()(input_ids=torch.tensor([engine.finished["A"].all_token_ids]), use_cache=False).logits[0]
    for position, row in engine.logits["A"]:
        assert float((row - expected[position]).abs().max()) <= TOLERANCE


def test_r8_3_the_workers_row_still_names_what_the_manager_has_given_back() -> None:
    engine = WindowEngine(budget=256)
    engine.add("A", tokens_of("gettysburg-address")[:21], 30)
    engine.run(8)
    (row,) = engine.runner.rows()
    window, other_window, full = engine.tables("A")
    assert window[:4] == other_window[:4] == [0, 0, 0, 0]
    assert all(full)
    assert list(row.block_ids[2]) == full
    for stale, table in zip(row.block_ids[:2], (window, other_window), strict=True):
        assert all(stale)
        assert [block for block in table if block] == list(stale[table.count(0) :])


def test_a_window_freed_one_block_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the manager takes the window for one block shorter than the kernel reads."""
    true = SlidingWindowManager.get_num_skipped_tokens
    monkeypatch.setattr(SlidingWindowManager, "get_num_skipped_tokens", lambda self, computed: true(self, computed) + (BLOCK_SIZE if computed > 12 else 0))
    engine = WindowEngine(num_blocks=72, caching=False)
    with pytest.raises(AssertionError):
        run_and_compare(engine)


def test_a_layer_that_reads_another_groups_table_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: every layer uses the slots and the table of group 0."""

    def one_table_for_all(**fields: object) -> ForwardContext:
        fields["attention_metadata"] = [fields["attention_metadata"][0]] * 3  # type: ignore[index]
        return ForwardContext(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.worker.batch_runner.ForwardContext", one_table_for_all)
    engine = WindowEngine(num_blocks=72, caching=False)
    with pytest.raises(AssertionError):
        run_and_compare(engine)


def test_a_layer_without_a_window_cannot_run_on_a_group_that_lets_blocks_go(model: PreTrainedModel) -> None:
    """A config.json that promises windows which the loaded layers do not have."""
    runner = ModelRunner(
        model, num_blocks=9, block_sizes=(4,), max_num_seqs=1, max_model_len=32, max_num_batched_tokens=8, kernel_settings=TORCH, sliding_windows=[8]
    )  # fmt: skip
    driver = Driver(runner)
    driver.add("A", [3, 4, 5])
    with pytest.raises(EngineError, match=r"^Layer 0 attends to all tokens, but its KV-cache group keeps only the last 8; the model's config.json contradicts"):
        driver.step({"A": 3})


def test_groups_that_do_not_name_every_layer_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidInput, match=r"^The KV-cache groups name 2 layers, but the model has 3; name each layer once\.$"):
        ModelRunner(
            model, num_blocks=9, block_sizes=(4, 4), max_num_seqs=1, max_model_len=32, max_num_batched_tokens=8, kernel_settings=TORCH, layer_groups=[0, 1]
        )  # fmt: skip
