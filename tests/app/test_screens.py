"""The screens without a browser: what the server sends for good and for bad addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

from engine.models import list_models
from kernels import BACKENDS
from scenarios import list_scenarios, list_scenes
from tests.conftest import ROOT

TIMEOUT = 60


def open_app(**address: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT)
    for name, value in address.items():
        app.query_params[name] = value
    return app.run()


def test_the_gallery_shows_every_scene_with_its_goal_and_its_source() -> None:
    app = open_app()
    assert not app.exception
    assert not app.error
    links = [link.proto.label.replace("\\", "") for link in app.get("page_link")]
    assert [label for label in links if "memory screen" not in label] == [info.title for info in list_scenes()]
    assert len(links) == len(list_scenes()) + 1
    shown = " ".join(m.value for m in app.markdown).replace("\\", "")
    sources = " ".join(c.value for c in app.caption).replace("\\", "")
    for info in list_scenes():
        assert info.goal in shown
        assert info.source in sources


@pytest.mark.parametrize("scene", [info.id for info in list_scenarios()])
def test_every_scene_opens_and_its_first_frames_need_no_model(scene: str) -> None:
    app = open_app(scene=scene)
    assert not app.exception
    assert not app.error
    assert len(app.get("bidi_component")) == 1


@pytest.mark.parametrize(
    ("address", "choices"),
    [
        ({"screen": "cinema"}, ["There is no screen “cinema”", "memory"]),
        ({"scene": "figure-66"}, [info.id for info in list_scenarios()]),
        ({"scene": "../../etc/passwd"}, [info.id for info in list_scenarios()]),
    ],
)
def test_an_unknown_name_in_the_address_gives_one_sentence_with_the_choices_and_the_gallery(address: dict[str, str], choices: list[str]) -> None:
    app = open_app(**address)
    assert not app.exception
    assert len(app.error) == 1
    message = app.error[0].value.replace("\\", "")
    assert message.endswith(".")
    assert "Traceback" not in message
    assert all(choice in message for choice in choices)
    assert len(app.get("page_link")) == len(list_scenes()) + 1


@pytest.mark.parametrize(
    ("address", "choices"),
    [
        ({"model": "gpt-17"}, [info.name for info in list_models()]),
        ({"model": "/etc"}, [info.name for info in list_models()]),
        ({"backend": "abacus"}, list(BACKENDS)),
        ({"layers": "9"}, ["0 to 3"]),
        ({"layers": "<script>"}, ["all", "none"]),
        ({"model": "tiny-swa", "backend": "abacus"}, list(BACKENDS)),
    ],
)
def test_what_a_scene_cannot_run_on_is_said_above_the_scene_on_its_own_model(address: dict[str, str], choices: list[str]) -> None:
    app = open_app(scene="figure-6", **address)
    assert not app.exception
    (error,) = app.error
    message = error.value.replace("\\", "")
    assert message.endswith(". The scene is shown on tiny, its own model.")
    assert all(choice in message for choice in choices)
    assert len(app.get("bidi_component")) == 1
    assert [box.value for box in app.selectbox if box.label == "Model"] == ["tiny"]


def test_a_backend_without_its_device_is_said_above_the_scene() -> None:
    app = open_app(scene="figure-6", backend="triton")
    assert len(app.error) == (0 if torch.cuda.is_available() else 1)
    assert len(app.get("bidi_component")) == 1


def test_a_model_that_is_not_installed_says_how_to_get_it() -> None:
    missing = [info for info in list_models() if not info.installed]
    for info in missing:
        app = open_app(scene="figure-6", model=info.name)
        assert not app.exception
        assert info.how_to_get in app.error[0].value.replace("\\", "")
        assert len(app.get("bidi_component")) == 1


def test_a_scene_whose_own_model_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the gallery's card and in its list of models, and when somebody opens it; nothing is pulled."""
    monkeypatch.setenv("PAGEWALK_CACHE", str(tmp_path))
    st.cache_resource.clear()  # where the model is installed, another test has opened the scene
    gemma = next(info for info in list_models() if info.name == "gemma3-270m")
    scene = next(info for info in list_scenes() if info.model == gemma.name)
    app = open_app()
    card, listed = [c.value for c in app.caption if gemma.how_to_get in c.value]
    assert gemma.licence in card
    assert gemma.licence in listed
    assert gemma.terms_address in listed
    app = open_app(scene=scene.id)
    assert not app.exception
    message = app.error[0].value.replace("\\", "")
    assert message == (
        "This scene runs on gemma3-270m (Gemma Terms of Use), which is not installed yet: "
        "run `python -m engine.models pull gemma3-270m` and load this page again."
    )
    assert len(app.get("page_link")) == len(list_scenes()) + 1
    assert list(tmp_path.iterdir()) == []


def test_a_scene_without_a_model_has_no_model_to_choose() -> None:
    app = open_app(scene="sliding-window")
    assert [box.label for box in app.selectbox] == ["Scene"]
    assert any("runs no model" in caption.value for caption in app.caption)


@pytest.mark.parametrize(
    ("scene", "before", "after"),
    [
        ("figure-6", "figure-5", "figure-7"),
        ("figure-10", "figure-9", "parallel-sampling"),
        # The group "vLLM V1 today" begins here, so nothing is before it.
        (next(info.id for info in list_scenes() if info.group == "vllm"), None, [info.id for info in list_scenes() if info.group == "vllm"][1]),
    ],
)
def test_a_scene_on_the_stage_leads_to_the_scenes_before_and_after_it(scene: str, before: str | None, after: str) -> None:
    links = {link.proto.label: link.proto for link in open_app(scene=scene).get("page_link")}
    titles = {info.id: info.title for info in list_scenes()}
    assert list(links) == (["←"] if before else []) + ["All scenes", "→"]
    assert links["→"].query_string == f"scene={after}"
    assert links["→"].help == titles[after]
    if before:
        assert links["←"].query_string == f"scene={before}"
        assert links["←"].help == titles[before]


def test_only_layers_with_attention_are_offered_to_the_interpreter() -> None:
    """A Mamba layer runs none of the kernels; tiny-hybrid has attention in the layers 0, 2 and 4."""
    app = open_app(scene="hybrid-state-live")
    layers = next(box for box in app.selectbox if box.label == "Through Triton's interpreter")
    assert layers.options == ["layer 0", "layer 2", "layer 4", "all layers (slow)", "no layer"]


def test_a_field_keeps_its_name_at_the_beginning_of_a_sentence() -> None:
    app = open_app(scene="hybrid-state-live", model="tiny")
    assert app.error[0].value.replace("\\", "").startswith("mamba_cache_mode is align, but tiny has no Mamba layers; ")


@pytest.mark.parametrize("address", [{"scene": "a" * 3000}, {"scene": "figure-6", "model": "a" * 3000}, {"screen": "kernels", "scene": "a" * 3000}])
def test_what_is_much_too_long_is_not_repeated_in_full(address: dict[str, str]) -> None:
    said = open_app(**address).error[0].value
    assert "aaa…aaa" in said
    assert "a" * 61 not in said
