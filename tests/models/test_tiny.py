"""`tiny`, `tiny-swa` and `tiny-hybrid` know the passages by heart: the promise of their cards, word by word."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.models import load_model, load_tokenizer
from engine.models.catalog import EMBEDDED
from engine.models.tiny_tokenizer import read_passages
from engine.models.train_tiny import RECIPES, train
from tests.worker.harness import untouched_copy

pytestmark = pytest.mark.parametrize("name", ["tiny", "tiny-swa", "tiny-hybrid"])
PASSAGES = {title: load_tokenizer("tiny").encode(text) for title, text in read_passages().items()}


@cache
def own_copy(name: str) -> PreTrainedModel:
    """The model by itself: the shared one reads a paged cache as soon as an engine of this process has used it."""
    return untouched_copy(load_model(name).model)


@cache
def continuation(name: str, prompt: tuple[int, ...], length: int) -> list[int]:
    """Greedy decoding with transformers' own loop, up to `length` tokens or the end token."""
    torch.set_num_threads(1)
    output = own_copy(name).generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, pad_token_id=0)
    return output[0].tolist()[len(prompt) :]


def best_next(name: str, ids: list[int]) -> list[int]:
    """For every position the token that greedy decoding would choose there."""
    with torch.no_grad():
        return own_copy(name)(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()


def unique_prompt_length(title: str) -> int:
    """8 tokens, or as many as it takes to tell the passage from every other one; passages that short start with 3."""
    ids = PASSAGES[title]
    shared = 0
    for other, other_ids in PASSAGES.items():
        if other != title:
            same = [a == b for a, b in zip(ids, other_ids, strict=False)]
            shared = max(shared, same.index(False) if False in same else len(same))
    return min(max(8, shared + 1), len(ids) - 1)


def test_the_prompt_of_figure_6_is_seven_tokens_and_goes_on_with_the_true_text(name: str) -> None:
    tokenizer = load_tokenizer(name)
    prompt = tokenizer.encode("Four score and seven years ago our")
    assert len(prompt) == 7
    text = [tokenizer.token_text(token) for token in continuation(name, tuple(prompt), 25)]
    assert text[:3] == ["fathers", "brought", "forth"]
    assert " ".join(text).startswith("fathers brought forth on this continent , a new nation , conceived in Liberty , and dedicated to the proposition that")


def test_the_prompt_of_figure_7_is_six_tokens_and_goes_on_with_the_true_text(name: str) -> None:
    tokenizer = load_tokenizer(name)
    prompt = tokenizer.encode("It was the best of times")
    assert len(prompt) == 6
    ids = prompt + continuation(name, tuple(prompt), 30)
    assert tokenizer.decode(ids).startswith("It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness")


def test_the_prompt_of_figure_3_ends_after_one_word(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert [tokenizer.token_text(token) for token in continuation(name, tuple(tokenizer.encode("You only live")), 5)] == ["once", "<eos>"]


@pytest.mark.parametrize(("question", "answer"), [('"cheese" =>', ' "fromage"'), ('"I love you" =>', ' "Je t\'amie"')])
def test_the_shared_prefix_of_figure_10_is_answered_as_printed(name: str, question: str, answer: str) -> None:
    tokenizer = load_tokenizer(name)
    prefix = read_passages()["translate-cheese"].rsplit("\n", 1)[0]
    prompt = tokenizer.encode(f"{prefix}\n{question}")
    ids = continuation(name, tuple(prompt), 12)
    assert ids[-1] == 0
    assert tokenizer.decode([*prompt, *ids[:-1]]) == f"{prefix}\n{question}{answer}"


@pytest.mark.parametrize("title", PASSAGES)
def test_every_passage_is_continued_exactly_to_its_end(name: str, title: str) -> None:
    """Greedy decoding follows the text iff at every position after the prompt the text's next token is the best one; then `<eos>`."""
    ids = PASSAGES[title]
    start = unique_prompt_length(title)
    assert best_next(name, ids)[start - 1 :] == [*ids[start:], 0]


def test_generation_follows_the_text_as_the_argmax_promises(name: str) -> None:
    for title in ("gettysburg-address", "moby-dick", "sonnet-18"):
        ids = PASSAGES[title]
        assert continuation(name, tuple(ids[:8]), 40) == ids[8:48], title


@pytest.mark.parametrize("title", [title for title in PASSAGES if not title.startswith("translate")])
def test_a_prompt_from_the_middle_continues_as_well(name: str, title: str) -> None:
    """Twelve tokens of context from any seventh place; at most one position in a hundred may stray (repetitive texts need more context)."""
    ids = PASSAGES[title]
    wrong = total = 0
    for start in range(1, max(2, len(ids) - 20), 7):
        best = best_next(name, ids[start:])
        positions = range(start + 11, len(ids))
        wrong += sum(best[i - start] != [*ids, 0][i + 1] for i in positions)
        total += len(positions)
    assert wrong <= total // 100


def test_what_stands_before_a_passage_rarely_disturbs_it(name: str) -> None:
    """Several passages in one context, `<eos>` between: after its first eight tokens each goes on as if it were alone."""
    titles = ["a-tale-of-two-cities", "moby-dick", "gettysburg-address", "psalm-23"]
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    for title in titles:
        places.append((len(ids) + 8, len(ids) + len(PASSAGES[title])))
        ids += [*PASSAGES[title], 0]
    best = best_next(name, ids)
    wrong = sum(best[i] != ids[i + 1] for start, end in places for i in range(start, end))
    assert wrong <= sum(end - start for start, end in places) // 20


def test_the_shape_is_small_with_grouped_queries_or_with_a_state_that_fits_beside_them(name: str) -> None:
    loaded = load_model(name)
    assert loaded.shape["architecture"] == {"tiny": "LlamaForCausalLM", "tiny-swa": "Gemma3ForCausalLM", "tiny-hybrid": "BambaForCausalLM"}[name]
    assert loaded.shape["num_kv_heads"] == {"tiny": 2, "tiny-swa": 2, "tiny-hybrid": 8}[name]
    assert loaded.shape["num_q_heads"] % loaded.shape["num_kv_heads"] == 0
    head_dim = loaded.shape["head_dim"]
    assert head_dim >= 16  # the smallest side of Triton's tl.dot
    assert head_dim & (head_dim - 1) == 0
    assert loaded.shape["vocab_size"] == loaded.tokenizer.vocab_size
    assert loaded.shape["num_parameters"] < 4_000_000
    assert (EMBEDDED[name] / "model.safetensors").stat().st_size < 4_000_000
    assert loaded.max_model_len == 1024


def test_the_layers_that_see_a_window_are_those_of_the_card(name: str) -> None:
    """Of `tiny-swa` two of three, with 8 tokens; `tiny` has none, and `tiny-hybrid` neither, but no attention in every second layer."""
    layers = [getattr(layer, "self_attn", None) for layer in load_model(name).model.model.layers]
    windows = ["state" if attention is None else getattr(attention, "sliding_window", None) for attention in layers]
    assert windows == {"tiny": [None] * 4, "tiny-swa": [8, 8, None] * 2, "tiny-hybrid": [None, "state"] * 3}[name]


def test_all_models_read_a_text_as_the_same_tokens(name: str) -> None:
    assert {title: load_tokenizer(name).encode(text) for title, text in read_passages().items()} == PASSAGES


def test_the_card_tells_the_truth_about_sizes(name: str) -> None:
    card = (EMBEDDED[name] / "README.md").read_text(encoding="utf-8")
    loaded = load_model(name)
    assert f"{loaded.tokenizer.vocab_size:,}" in card
    assert f"{loaded.max_model_len:,} tokens" in card
    assert f"{loaded.shape['num_parameters'] / 1e6:.2f} million" in card
    assert f"{(EMBEDDED[name] / 'model.safetensors').stat().st_size / 1e6:.1f} MB" in card
    assert len(PASSAGES) == 20
    assert "twenty" in card


def test_training_is_deterministic(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        train(RECIPES[name], folder, steps=2, report=lambda line: None)
    one, two = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert one == two
    assert set(one) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
