"""Model folders whose config.json contradicts itself or the weights: one sentence, never numbers that nobody trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.models.catalog import EMBEDDED
from scenarios.__main__ import INVALID, RAISED, main


def copy_of(model: str, folder: Path, **changes: Any) -> str:
    """The model's files with other values in config.json; None takes a value out."""
    for file in EMBEDDED[model].iterdir():
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}), encoding="utf-8")
    return str(folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["run", *arguments, "--backend", "torch", "--json"])
    errors = capsys.readouterr().err.strip()
    assert "Traceback" not in errors
    assert "\n" not in errors
    return code, errors


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("tiny", {"num_hidden_layers": "four"}, "says the num_hidden_layers 'four' in its config.json, which must be a whole number from 1 on"),
        ("tiny", {"num_key_value_heads": 0}, "says the num_key_value_heads '0'"),
        ("tiny", {"max_position_embeddings": "many"}, "says the max_position_embeddings 'many'"),
        ("tiny", {"hidden_size": True}, "says the hidden_size 'True'"),
        ("tiny", {"layer_types": 5}, "says the layer_types '5' in its config.json, which must be a list"),
        ("tiny", {"layer_types": "full_attention"}, "says the layer_types 'full_attention'"),
        ("tiny-swa", {"sliding_window": 0}, "says the sliding_window 0 in its config.json, but a token sees at least itself"),
        ("tiny-swa", {"sliding_window": -8}, "says the sliding_window -8"),
        ("tiny-hybrid", {"attn_layer_indices": "0,2"}, "says the attn_layer_indices '0,2'"),
        ("tiny-hybrid", {"mamba_n_heads": None}, "says no mamba_n_heads"),
        ("tiny-hybrid", {"mamba_d_state": 0}, "says the mamba_d_state '0'"),
        ("tiny-hybrid", {"mamba_expand": "wide"}, "says the mamba_expand 'wide'"),
        ("tiny-hybrid", {"mamba_d_head": 1.5}, "says the mamba_d_head '1.5'"),
        ("tiny-hybrid", {"mamba_n_groups": -1}, "says the mamba_n_groups '-1'"),
        ("tiny-hybrid", {"max_position_embeddings": None}, "says no max_position_embeddings"),
        ("tiny", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "has quantized weights (quantization_config)"),
    ],
)
@pytest.mark.parametrize("scene", ["figure-6-v1", "figure-6"])
def test_what_config_json_says_wrongly_is_named(
    scene: str, model: str, changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both engines, V1's and the paper's."""
    code, errors = said(capsys, scene, "--model", copy_of(model, tmp_path, **changes))
    assert code == INVALID
    assert says in errors


def test_a_model_of_states_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = said(capsys, "figure-6-v1", "--model", copy_of("tiny-hybrid", tmp_path, attn_layer_indices=[]))
    assert code == INVALID
    assert "has no layer with attention, so there are no keys and values to page; bring a model with some" in errors


@pytest.mark.parametrize(
    ("model", "changes", "lacks"),
    [
        ("tiny", {"num_hidden_layers": 9}, "model.layers.4."),
        ("tiny-hybrid", {"attn_layer_indices": [0, 1, 2, 3, 4, 5]}, "model.layers.1.self_attn.k_proj.weight"),
    ],
)
def test_weights_that_are_not_there_are_not_made_up(
    model: str, changes: dict[str, Any], lacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers gives weights that a file lacks random numbers, and a table of them to its log."""
    code, errors = said(capsys, "figure-6-v1", "--model", copy_of(model, tmp_path, **changes))
    assert code == RAISED
    assert f"lack {lacks}" in errors
    assert errors.endswith("more, which its config.json asks for: the files do not belong together.")


def test_weights_of_another_shape_are_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = said(capsys, "figure-6-v1", "--model", copy_of("tiny-hybrid", tmp_path, mamba_d_conv=2))
    assert code == RAISED
    assert "cannot be loaded (its weights have other shapes than its config.json says)" in errors
