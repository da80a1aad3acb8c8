"""Figure scenes on screen, without a browser: they open, their choices work, what is quoted or unconfirmed is marked, and every chart can be saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from scenarios import list_scenes, load_figure
from scenarios.figures.registry import KINDS
from scenarios.loader import figure_files
from tests.conftest import ROOT
from views.screens.figure_views import VIEWS

TIMEOUT = 60
FIGURES = sorted(figure_files())


def open_app(**address: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT)
    for name, value in address.items():
        app.query_params[name] = value
    return app.run()


def charts(app: AppTest) -> list[str]:
    return [json.dumps(json.loads(chart.proto.spec), ensure_ascii=False) for chart in app.get("plotly_chart")]


def htmls(app: AppTest) -> str:
    return " ".join(block.proto.body for block in app.get("html"))


def test_every_kind_of_figure_has_a_view() -> None:
    assert set(VIEWS) == set(KINDS)


@pytest.mark.parametrize("scene", FIGURES)
def test_every_figure_opens_with_its_words_and_can_be_saved(scene: str) -> None:
    app = open_app(scene=scene)
    assert not app.exception
    assert not app.error
    made = load_figure(scene)
    shown = htmls(app).replace("&#x27;", "'").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    for text in (made.title, made.goal, *(note.say for note in made.notes)):
        assert text in shown
    assert shown.count("unconfirmed</span>") >= sum(note.unconfirmed for note in made.notes)
    drawn = app.get("plotly_chart")
    assert drawn
    for chart in drawn:
        config: dict[str, Any] = json.loads(chart.proto.config)
        assert config["toImageButtonOptions"]["format"] == "svg"
        assert config["modeBarButtons"] == [["toImage"]]
    assert [button.proto.label for button in app.get("download_button")] == ["CSV"] * len(drawn)


def test_a_chosen_model_and_card_are_computed_anew() -> None:
    app = open_app(scene="figure-1")
    app.selectbox(key="card-figure-1").set_value(80).run()
    assert not app.exception
    # 95 % of 80 GB less 25.7 GB of parameters
    assert "50.3 GB, 62.9 %" in charts(app)[0]
    assert "the paper" not in charts(app)[0], "the paper's card has 40 GB"


def test_a_model_that_does_not_fit_gives_one_sentence_and_the_choice_stays() -> None:
    app = open_app(scene="figure-1")
    app.selectbox(key="shape-figure-1").set_value("OPT-175B").run()
    assert not app.exception
    assert len(app.error) == 1
    assert "take a larger card or a smaller model" in app.error[0].value
    app.selectbox(key="card-figure-1").set_value(640).run()
    assert not app.error
    assert "349.2 GB" in charts(app)[0]


def test_the_slider_moves_both_lookups() -> None:
    app = open_app(scene="page-table")
    app.slider(key="at-page-table").set_value(8).run()
    assert not app.exception
    drawn = charts(app)[0]
    assert "slot 3 × 4 + 0 = 12" in drawn
    assert "address 0 × 4,096 + 0 = 0" in drawn


def test_the_slider_of_iterations_says_who_does_what() -> None:
    """By hand: in iteration 5 of whole batches R2 and R3 are padded; by iteration R5 has taken R3's place."""
    app = open_app(scene="iteration-level-batching")
    app.slider(key="iteration-iteration-level-batching").set_value(5).run()
    told = htmls(app)
    assert "iteration 5: R1 (next token); R2 and R3 (padding); R4, R5 and R6 (waiting). Idle places: 2 of 3." in told
    assert "iteration 5: R1 and R4 (next token); R5 (prompt); R6 (waiting). Idle places: 0 of 3." in told


def test_blocks_of_16_leave_slots_empty() -> None:
    app = open_app(scene="figure-3")
    app.get("button_group")[0].set_value(16).run()
    assert not app.exception
    assert "12 of 32 slots hold a token (38 %)" in charts(app)[0]


def test_the_overview_leads_to_the_steps() -> None:
    app = open_app(scene="figure-4")
    drawn = charts(app)[0]
    assert '?scene=figure-6&step=20\\" target=\\"_self\\"' in drawn
    assert "Cache Engine 0" in drawn


def test_the_gallery_has_the_figures_in_reading_order_and_the_memory_screen() -> None:
    app = open_app()
    labels = [link.proto.label.replace("\\", "") for link in app.get("page_link")]
    figures = [label for label in labels if label.startswith("Figure ") and ":" in label]
    numbers = [int(label.split()[1].rstrip(":")) for label in figures]
    assert numbers == sorted(numbers)
    assert numbers[:4] == [1, 2, 3, 4]
    assert any("memory screen" in label for label in labels)
    assert [info.figure for info in list_scenes()][:4] == ["memory_layout", "memory_waste", "reservation_strips", "overview"]


def test_an_unknown_scene_names_figures_too() -> None:
    app = open_app(scene="figure-22")
    assert not app.exception
    assert "figure-2" in app.error[0].value.replace("\\", "")
