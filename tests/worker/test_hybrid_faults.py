"""What goes wrong with recurrent states in real engines, done here on purpose (A45, A46, A50): each fault is found, and has a name. And what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import engine.state_steps
from engine.errors import EngineError, InvalidInput
from engine.models import load_model
from engine.paper.config import PaperConfig
from engine.session import RequestSpec, Session, SessionConfig
from engine.state_steps import StateStep, state_column, state_steps
from engine.trace.integrity import IntegrityError
from engine.trace.state_check import OWN_PREFIX
from engine.trace.witness_check import COPIES_PAIRS
from engine.worker import mamba_mixer
from engine.worker.batch_runner import BatchRunner
from engine.worker.kernel_settings import KernelSettings, choose_kernel_settings
from engine.worker.kv_cache import KVCache, LayerShape, StateShape
from engine.worker.model_runner import ModelRunner
from engine.worker.sequence_runner import SequenceRunner
from kernels import Backend
from tests.worker.harness import TOLERANCE, TORCH, untouched_copy
from tests.worker.hybrid_engine import HybridEngine, Size, groups_of, random_bamba, tokens, worst_difference

INTERPRET = KernelSettings(Backend("interpret", "test"))


@pytest.fixture
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return random_bamba(Size())


def play(engine: HybridEngine) -> HybridEngine:
    """A runs for a while, B begins like A and goes on differently, C has nothing to do with them."""
    prompt = tokens(27, 1)
    engine.add("A", prompt, 20)
    engine.run(2)
    engine.add("B", prompt[:26] + tokens(7, 2), 12)
    engine.add("C", tokens(9, 3), 12)
    engine.run()
    return engine


def difference(engine: HybridEngine) -> float:
    return worst_difference(engine, untouched_copy(engine.runner.model))


# ---------------------------------------------------------------------- A45: another group's block size
def test_a45_the_column_comes_from_the_mamba_groups_own_block_size() -> None:
    """The case's numbers: 16 tokens are computed, states every 8 tokens, another group has blocks of 2. Right is column 1; 7 is not in the row."""
    assert state_column(16, 8, "align") == 1
    assert state_steps([3, 5, 6], 8, "align", 16, 17) == [StateStep(5, 16, 6, 17)]
    with pytest.raises(EngineError, match=r"^The state after 16 tokens belongs in column 7, but the row has 3 blocks: \[3, 5, 6\]\.$"):
        state_steps([3, 5, 6], 2, "align", 16, 17)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a45_states_every_8_tokens_beside_attention_in_blocks_of_4(model: PreTrainedModel, mode: str) -> None:
    engine = play(HybridEngine(model, mode=mode, state_block_size=8, budget=16))
    assert [table.block_size for table in engine.runner.block_table.block_tables] == [4, 8]
    assert difference(engine) <= TOLERANCE


@pytest.mark.parametrize(("used", "error"), [(4, EngineError), (2, EngineError), (16, IntegrityError)])
def test_a45_on_the_worker_a_wrong_block_size_never_goes_unnoticed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, used: int, error: type[Exception]
) -> None:
    """Too small a size leaves the row, too large a one comes to a block that the request has given back (R8.3)."""
    monkeypatch.setattr(engine.state_steps, "state_column", lambda num_tokens, block_size, mode: (num_tokens - 1) // used)
    with pytest.raises(error, match=r"belongs in column \d, but the row has 2 blocks|which is not in its block table"):
        play(HybridEngine(model, mode="all", state_block_size=8, budget=16))


def test_a45_another_request_s_block_in_the_right_column_is_named(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent kind: the row of the request next to it. The state is one after as many tokens, but somebody else's."""
    true = BatchRunner._states

    def swapped(runner: BatchRunner, parts: Any) -> Any:
        states = true(runner, parts)
        for requests in states.values():
            if len(requests) > 1 and all(request.is_update for request in requests):
                first, second = requests[0].steps[0], requests[1].steps[0]
                requests[0] = mamba_mixer.StateRequest(requests[0].start, requests[0].end, (first._replace(source_block_id=second.source_block_id),))
        return states

    monkeypatch.setattr(BatchRunner, "_states", swapped)
    made = HybridEngine(model, budget=64)
    made.add("A", tokens(10, 1), 6)
    made.add("B", tokens(10, 2), 6)
    with pytest.raises(IntegrityError, match=rf"breaks “{OWN_PREFIX}”: A reads its state from block \d+, which is not in its block table"):
        made.run()


# ---------------------------------------------------------------------- A46: the null block as a state
def test_a46_the_null_block_in_a_row_is_no_state() -> None:
    """The case's row [0, 0, 5]: one column too few is a null block, which is neither read nor written."""
    assert state_steps([0, 0, 5], 4, "align", 9, 10) == [StateStep(5, 9, 5, 10)]
    with pytest.raises(EngineError, match=r"^The state after 8 tokens belongs in column 1, but the row has the null block there: \[0, 0, 5\]\.$"):
        state_steps([0, 0, 5], 4, "align", 8, 9)
    with pytest.raises(EngineError, match=r"The state after 5 tokens .* the null block"):
        state_steps([7, 0], 4, "align", 4, 5)


def test_a46_on_the_worker_one_column_too_few_stops_the_step(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.state_steps, "state_column", lambda num_tokens, block_size, mode: max((num_tokens - 1) // block_size - 1, 0))
    with pytest.raises(EngineError, match="but the row has the null block there"):
        play(HybridEngine(model, budget=16))


def test_a46_the_null_block_stays_as_it_was(model: PreTrainedModel) -> None:
    made = play(HybridEngine(model, budget=16))
    pages = [cache[0] for caches in (made.runner.kv_cache.key_caches, made.runner.kv_cache.value_caches) for cache in caches]
    assert all(bool(page.isnan().all()) for page in pages)


# ---------------------------------------------------------------------- A50: part of a copy
def partial_hit(engine: HybridEngine) -> HybridEngine:
    """B and C go on inside A's block: copies of attention's pages and of states."""
    prompt = tokens(26, 1)
    engine.add("A", prompt, 20)
    engine.run(2)
    engine.add("B", prompt + tokens(5, 2), 10)
    engine.add("C", [*prompt, 7], 10)
    engine.run()
    return engine


@pytest.mark.parametrize("backend", ["torch", "interpret"])
def test_a50_a_copy_is_the_whole_page_of_every_layer(backend: str) -> None:
    """A page has room to spare behind the state; the copy takes it all, once per memory, so attention's slots are whole and the state is."""
    layers = [LayerShape(4, 8, 0), StateShape(36, 3, 4, 8, 2, 1)] * 2
    cache = KVCache(num_blocks=5, block_sizes=(4, 4), layers=layers, dtype=torch.float32)
    for number, pages in enumerate((*cache.key_caches, *cache.value_caches)):
        pages.copy_(torch.arange(pages.numel(), dtype=torch.float32).view_as(pages) + number)
    before = [pages[1].clone() for pages in (*cache.key_caches, *cache.value_caches)]
    cache.copy_blocks([(1, 3)], Backend(backend, "test"))
    for pages, page in zip((*cache.key_caches, *cache.value_caches), before, strict=True):
        assert torch.equal(pages[3], page)
        assert torch.equal(pages[1], page)
    for layer in (1, 3):
        assert torch.equal(cache.ssm_states[layer][3], before[layer].flatten()[:64].view(4, 8, 2))
        assert torch.equal(cache.conv_states[layer][3], before[4 + layer].flatten()[:108].view(36, 3))


def test_a50_the_first_layer_of_a_memory_may_be_a_mamba_layer() -> None:
    """Its state is shorter than the page; by its view a copy would take half of it."""
    cache = KVCache(num_blocks=4, block_sizes=(4, 4), layers=[StateShape(36, 3, 4, 8, 2, 0), LayerShape(4, 8, 1)], dtype=torch.float32)
    cache.key_caches[1][1] = 3.0
    cache.copy_blocks([(1, 2)], Backend("torch", "test"))
    assert bool((cache.key_caches[1][2] == 3).all())
    cache.zero_blocks([2])
    assert not cache.key_caches[1][2].any()
    assert cache.num_bytes == 2 * 4 * 4 * 4 * 8 * 4


def half_copies(half: str) -> Callable[..., None]:
    """copy_blocks that forgets the values' memory, where convolutions' states lie, or the keys', where SSM states do."""
    true = KVCache.copy_blocks

    def copy(cache: KVCache, pairs: Any, *arguments: Any, **named: Any) -> None:
        forgotten = cache.value_caches if half == "keys" else cache.key_caches
        kept = [pages.clone() for pages in forgotten]
        true(cache, pairs, *arguments, **named)
        for pages, old in zip(forgotten, kept, strict=True):
            pages.copy_(old)

    return copy


@pytest.mark.parametrize("half", ["keys", "values"])
def test_a50_half_a_copy_is_found_by_what_the_model_says(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    assert difference(partial_hit(HybridEngine(model, block_size=8, unit=2))) <= TOLERANCE
    monkeypatch.setattr(KVCache, "copy_blocks", half_copies(half))
    assert difference(partial_hit(HybridEngine(model, block_size=8, unit=2))) == float("inf")


def test_a50_a_kernel_that_copies_keys_alone_is_named_by_its_witness(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.launch import Launcher

    true = Launcher._copy_pages

    def keys_alone(launcher: Launcher, caches: tuple[torch.Tensor, ...], *arguments: Any) -> None:
        true(launcher, caches[:1], *arguments)

    monkeypatch.setattr(Launcher, "_copy_pages", keys_alone)
    with pytest.raises(IntegrityError, match=rf"breaks “{COPIES_PAIRS}”: copy_blocks in layers .* never read the value in slot"):
        partial_hit(HybridEngine(model, block_size=8, unit=2, settings=INTERPRET, kernel_witness=True))


def test_a50_a_copy_that_nobody_made_is_named(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_change_blocks", lambda runner, scheduler_output: None)
    with pytest.raises(IntegrityError, match=r"breaks “a hashed state is the one its key names”: block 7 is hashed as the state after 26 tokens, but has none"):
        partial_hit(HybridEngine(model, block_size=8, unit=2))


def test_a_consumer_s_copy_that_nobody_made_leaves_it_without_a_state(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the copies for B and C are forgotten; the one that A needs is made."""
    true = ModelRunner._copy_pages

    def first_only(runner: ModelRunner, pairs: Any, *arguments: Any) -> None:
        if len(pairs) == 1:
            true(runner, pairs, *arguments)

    monkeypatch.setattr(ModelRunner, "_copy_pages", first_only)
    with pytest.raises(IntegrityError, match=rf"breaks “{OWN_PREFIX}”: B reads the state after 26 tokens from block \d+, which has no state"):
        partial_hit(HybridEngine(model, block_size=8, unit=2))


# ---------------------------------------------------------------------- what the mixer itself could get wrong
@pytest.mark.parametrize("left", ["ssm_left", "conv_left"])
@pytest.mark.parametrize("method", ["update", "scan"])
def test_a_state_that_is_not_written_is_found_by_what_the_model_says(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, left: str, method: str) -> None:
    """The mutation: one of the two states stays as it was, after updates of one token or after scans over many."""
    true = getattr(mamba_mixer._Recurrence, method)

    def forgetful(recurrence: Any, metadata: Any) -> None:
        before = len(getattr(recurrence, left))
        true(recurrence, metadata)
        states = getattr(recurrence, left)
        states[before:] = [torch.zeros_like(state) for state in states[before:]]

    monkeypatch.setattr(mamba_mixer._Recurrence, method, forgetful)
    assert difference(play(HybridEngine(model, budget=16))) > TOLERANCE


# ---------------------------------------------------------------------- what is refused
def test_a_state_that_does_not_fit_names_the_smallest_block_size() -> None:
    layers = [LayerShape(4, 8, 0), StateShape(36, 3, 4, 8, 2, 1)]
    with pytest.raises(
        InvalidInput,
        match=r"^A state of layer 1 takes 64 numbers for its SSM state and 108 for its convolution, but a block of 3 tokens has room for 96 of each; "
        r"give a block_size of at least 4\.$",
    ):
        KVCache(num_blocks=4, block_sizes=(3, 3), layers=layers, dtype=torch.float32)
    KVCache(num_blocks=4, block_sizes=(4, 4), layers=layers, dtype=torch.float32)


def test_a_model_of_states_alone_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^No layer of the model has attention"):
        KVCache(num_blocks=4, block_sizes=(4,), layers=[StateShape(36, 3, 4, 8, 2)], dtype=torch.float32)


def test_a_mamba_layer_cannot_be_interpreted(model: PreTrainedModel) -> None:
    sentence = r"^Layer 1 cannot be interpreted: it keeps a recurrent state and runs no attention kernel; choose among the attention layers 0, 2, 4\.$"
    with pytest.raises(InvalidInput, match=sentence):
        HybridEngine(model, settings=KernelSettings(Backend("torch", "test"), (1,)))
    with pytest.raises(InvalidInput, match=sentence):
        choose_kernel_settings("torch", (1,), num_layers=6, attention_layers=(0, 2, 4))
    assert choose_kernel_settings("torch", "all", num_layers=6, attention_layers=(0, 2, 4)).interpreted_layers == (0, 2, 4)
    assert choose_kernel_settings("torch", None, num_layers=6, attention_layers=(1, 3)).interpreted_layers == (1,)


def test_layers_in_groups_of_the_other_kind_are_refused(model: PreTrainedModel) -> None:
    sizes: dict[str, Any] = {"num_blocks": 9, "max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 8, "kernel_settings": TORCH}
    with pytest.raises(EngineError, match=r"^Layer 1 of BambaForCausalLM keeps a recurrent state, but its KV-cache group 0 is for keys and values"):
        ModelRunner(model, block_sizes=(4,), **sizes)
    with pytest.raises(EngineError, match=r"^Layer 0 of BambaForCausalLM stores keys and values, but its KV-cache group 1 is for recurrent states"):
        ModelRunner(model, block_sizes=(4, 4), layer_groups=[1, 1, 0, 1, 0, 1], mamba_cache_modes=[None, "align"], **sizes)
    with pytest.raises(EngineError, match="run it in vLLM V1's engine"):
        SequenceRunner(model, config=PaperConfig(num_blocks=9, block_size=4), max_model_len=32, kernel_settings=TORCH)


def test_a_session_refuses_to_interpret_a_mamba_layer_before_anything_is_loaded() -> None:
    spec = RequestSpec("A", (3, 4, 5))
    with pytest.raises(InvalidInput, match=r"layer 1 of tiny-hybrid keeps a recurrent state .* attention layers are 0, 2, 4"):
        Session(SessionConfig(num_blocks=20, block_size=4), (spec,), vocabulary=str, model_name="tiny-hybrid", backend="torch", interpreted_layers=(1,))


def test_outside_an_engine_the_redirected_model_says_what_to_do() -> None:
    """A Mamba layer that comes first says it as an attention layer does."""
    made = random_bamba(Size("MA"))
    HybridEngine(made)
    with pytest.raises(EngineError, match="Mamba layers keep their states in a paged cache, so it runs only inside an engine; load another copy"):
        made(input_ids=torch.tensor([[3, 4]]))
    reference = untouched_copy(made)
    assert bool(reference(input_ids=torch.tensor([[3, 4]])).logits.isfinite().all())


def test_a_copy_of_a_redirected_model_runs_on_its_own_layers() -> None:
    """As when a model goes to another device while a session still has it here."""
    made = random_bamba(Size())
    HybridEngine(made)
    twin = copy.deepcopy(made)
    with torch.no_grad():
        for mixer in mamba_mixer.mixers_of(twin):
            assert mixer.forward.args == (mixer,)
            mixer.D.add_(1.0)
    assert difference(play(HybridEngine(twin, budget=16))) <= TOLERANCE
    assert difference(play(HybridEngine(made, budget=16))) <= TOLERANCE


def test_groups_of_the_loaded_model_are_those_that_its_config_gives() -> None:
    """What `engine.models` reads from config.json without loading, and what the loaded mixers say."""
    from engine.group_config import group_specs
    from engine.models import kv_cache_groups_of

    from_config = group_specs(kv_cache_groups_of("tiny-hybrid", 4), 4)
    loaded = groups_of(load_model("tiny-hybrid").model, 4, "align")
    assert [group.layer_names for group in from_config] == [group.layer_names for group in loaded]
    assert [group.kv_cache_spec for group in from_config] == [group.kv_cache_spec for group in loaded]
