"""How much attention each block gets, against the weights that transformers' own eager attention returns (the paper, section 4.1)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from engine.core.output import SamplingParams
from engine.models import load_model
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.events import AttentionComputed, Event
from engine.worker.kernel_settings import KernelSettings
from tests.worker.hand_made_groups import HandMadeGroups, make_sequence_runner
from tests.worker.harness import INTERPRET, ONE_LAYER, TORCH, VOCAB_SIZE, Driver, make_runner, random_llama, random_prompt, untouched_copy


@torch.inference_mode()
def expected_shares(model: PreTrainedModel, token_ids: list[int], layer: int, block_size: int) -> list[float]:
    """Transformers: the last query's weights in `layer`, mean over heads, added up block by block."""
    return [sum(shares) / len(shares) for shares in zip(*expected_head_shares(model, token_ids, layer, block_size), strict=True)]


@torch.inference_mode()
def expected_head_shares(model: PreTrainedModel, token_ids: list[int], layer: int, block_size: int) -> list[list[float]]:
    """The same for each query head."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    weights = twin(input_ids=torch.tensor([token_ids]), use_cache=False, output_attentions=True).attentions[layer][0, :, -1]
    return [[float(row[i : i + block_size].sum()) for i in range(0, len(token_ids), block_size)] for row in weights]


def attention_of(events: list[Event]) -> AttentionComputed:
    found = [e for e in events if isinstance(e, AttentionComputed)][-1]
    return found


@pytest.mark.parametrize(("settings", "layer"), [(TORCH, 0), (ONE_LAYER, 1), (INTERPRET, 0)], ids=["no layer compared", "layer 1", "all layers"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_v1_shares_are_those_of_eager_attention(settings: KernelSettings, layer: int, block_size: int) -> None:
    """A prefill in chunks, a second request beside it, then decodes: in the first compared layer, else in layer 0."""
    model, plain = random_llama(), random_llama()
    events: list[Event] = []
    runner = make_runner(model, block_size=block_size, num_blocks=96, kernel_settings=settings, emit=events.append, attention_shares=True)
    driver = Driver(runner)
    driver.add("A", random_prompt(11, seed=0))
    driver.add("B", random_prompt(6, seed=1))
    for scheduled in ({"A": 7}, {"A": 4, "B": 6}, {"A": 1, "B": 1}, {"B": 1}):
        driver.step(scheduled)
        attention = attention_of(events)
        assert attention.shares_layer == layer
        assert attention.request_ids == list(scheduled)
        for name, shares, by_head in zip(attention.request_ids, attention.block_shares, attention.head_shares, strict=True):
            request = driver.requests[name]
            for row, due in zip(by_head, expected_head_shares(plain, request.token_ids[: request.num_computed], layer, block_size), strict=True):
                assert row == pytest.approx(due, abs=1e-5)
                assert sum(row) == pytest.approx(1, abs=1e-6)
            assert shares == pytest.approx(expected_shares(plain, request.token_ids[: request.num_computed], layer, block_size), abs=1e-5)
            assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_sequences_that_share_blocks_have_shares_of_their_own(model: PreTrainedModel) -> None:
    events: list[Event] = []
    groups = HandMadeGroups(make_sequence_runner(model, emit=events.append, attention_shares=True))
    groups.add("A1", random_prompt(7, seed=0))
    groups.step()
    groups.sequences["A1"].token_ids.pop()
    groups.fork("A1", "A2")
    for name, token_id in (("A1", 5), ("A2", 6)):
        groups.append(name, token_id)
    groups.step(sample=False)
    rows = attention_of(events).block_shares
    plain = random_llama()
    for shares, sequence in zip(rows, groups.sequences.values(), strict=True):
        assert shares == pytest.approx(expected_shares(plain, sequence.token_ids, 0, 4), abs=1e-5)
    assert rows[0] != rows[1]


def test_nothing_behind_a_window_is_seen() -> None:
    """A window of 6 tokens: blocks that lie before it get exactly nothing."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=6, initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    plain, events = copy.deepcopy(model), []
    driver = Driver(make_runner(model, emit=events.append, attention_shares=True))
    driver.add("A", random_prompt(13, seed=0))
    driver.step({"A": 13})
    (shares,) = attention_of(events).block_shares
    assert shares == pytest.approx(expected_shares(plain, driver.requests["A"].token_ids[:13], 0, 4), abs=1e-5)
    assert shares[0] == 0
    assert shares[1] > 0


def test_nobody_is_told_who_did_not_ask(model: PreTrainedModel) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append))
    driver.add("A", random_prompt(5, seed=0))
    driver.step({"A": 5})
    assert (attention_of(events).block_shares, attention_of(events).head_shares, attention_of(events).shares_layer) == ([], [], None)


def test_a_session_passes_the_setting_on() -> None:
    """The whole way from the settings to the frame, on the embedded model."""
    loaded = load_model("tiny")
    plain = untouched_copy(loaded.model)
    prompt = loaded.tokenizer.encode("Four score and seven years ago our")
    config = SessionConfig(num_blocks=9, block_size=4, attention_shares=True)
    session = Session(config, (RequestSpec("A", tuple(prompt), SamplingParams(max_tokens=2)),), vocabulary=str, model_name="tiny")
    told = [frame.event for frame in session.run_to_end().frames if isinstance(frame.event, AttentionComputed)]
    assert [len(event.block_shares[0]) for event in told] == [2, 2]
    assert told[0].block_shares[0] == pytest.approx(expected_shares(plain, prompt, 0, 4), abs=1e-5)
