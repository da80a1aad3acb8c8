"""The kernels screen without a browser: its parts, its choices in the address, what it says where there is nothing to see."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from engine.errors import InvalidInput
from engine.trace.events import AttentionComputed, SlotsMapped
from engine.trace.frame import Frame
from scenarios import open_session
from tests.conftest import ROOT

TIMEOUT = 120
SCENE = "sliding-window-live"


def open_kernels(**address: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=TIMEOUT)
    for name, value in {"screen": "kernels", **address}.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception
    return app


def address_of(app: AppTest) -> dict[str, str]:
    return {name: "".join(value) for name, value in app.query_params.items()}


def shown(app: AppTest) -> str:
    return " ".join(str(element.value) for element in (*app.title, *app.markdown, *app.caption, *app.get("html"))).replace("\\", "")


def charts(app: AppTest) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """The run that the screen shows, made by the test itself."""
    return open_session(SCENE).run_to_end().frames


@pytest.fixture(scope="module")
def mixed(frames: list[Frame]) -> Frame:
    """The attention of the first step with a decode and a prefill in one batch."""
    return next(f for f in frames if isinstance(f.event, AttentionComputed) and len(f.event.query_lens) == 2 and max(f.event.query_lens) > 1)


@pytest.mark.parametrize(
    ("part", "num_charts", "says"),
    [
        ("Attention", 3, "Launch grid"),
        ("Slots", 1, "Where −1 comes from"),
        ("Reference and Triton", 1, "The largest difference of all is"),
        ("Source", 0, "Constants of this launch"),
        ("Compiled", 0, "Registers"),
    ],
)
def test_every_part_opens_by_its_address(mixed: Frame, part: str, num_charts: int, says: str) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq), part=part)
    assert not app.error
    assert app.title[0].value.startswith(f"Kernels of engine step {mixed.step} ")
    assert len(charts(app)) == num_charts
    assert says in shown(app)
    wanted = {"screen": "kernels", "scene": SCENE, "step": str(mixed.seq)} | ({"part": part} if part != "Attention" else {})
    assert address_of(app) == wanted


def test_any_frame_of_the_step_leads_to_its_batch(frames: list[Frame], mixed: Frame) -> None:
    first = next(f for f in frames if f.step == mixed.step)
    event = mixed.event
    assert isinstance(event, AttentionComputed)
    said = shown(open_kernels(scene=SCENE, step=str(first.seq)))
    for request_id, queries, keys in zip(event.request_ids, event.query_lens, event.seq_lens, strict=True):
        assert f"**{request_id}**: {queries} quer{'y' if queries == 1 else 'ies'} on {keys} keys" in said


def test_without_a_step_the_first_one_that_is_computed_is_shown(frames: list[Frame]) -> None:
    first, second = [f for f in frames if isinstance(f.event, AttentionComputed)][:2]
    app = open_kernels(scene=SCENE)
    assert address_of(app) == {"screen": "kernels", "scene": SCENE, "step": str(first.seq)}
    app.button(key="kernels-after").click().run()
    assert address_of(app)["step"] == str(second.seq)


def test_the_buttons_lead_from_one_computed_step_to_the_next_and_keep_the_choices(frames: list[Frame], mixed: Frame) -> None:
    computed = [f for f in frames if isinstance(f.event, AttentionComputed)]
    place = computed.index(mixed)
    app = open_kernels(scene=SCENE, step=str(mixed.seq), part="Slots", layer="2")
    app.button(key="kernels-after").click().run()
    assert not app.exception
    assert address_of(app) == {"screen": "kernels", "scene": SCENE, "step": str(computed[place + 1].seq), "part": "Slots", "layer": "2"}
    app.button(key="kernels-before").click().run()
    assert address_of(app)["step"] == str(mixed.seq)


def test_a_click_that_comes_with_the_address_of_before_is_not_lost(frames: list[Frame], mixed: Frame) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq))
    app.button(key="kernels-after").click().run()
    step = address_of(app)["step"]
    assert step != str(mixed.seq)
    app.query_params["step"] = str(mixed.seq)  # as a browser sends it that has not heard of the change yet
    app.selectbox(key="kernels-pick-layer").set_value(1).run()
    assert {name: address_of(app)[name] for name in ("step", "layer")} == {"step": step, "layer": "1"}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_clicked_token_shows_the_slot_that_the_run_gave_it_in_the_group_of_the_layer(frames: list[Frame], mixed: Frame, layer: int) -> None:
    # tiny-swa: layers 0 and 3 are group 0, 1 and 4 group 1, 2 and 5 group 2; each has slots of its own.
    mapped = [f.event for f in frames if f.step == mixed.step and isinstance(f.event, SlotsMapped) and f.event.group_id == layer]
    slots = [slot for event in mapped for slot in event.slots]
    app = open_kernels(scene=SCENE, step=str(mixed.seq), part="Slots", layer=str(layer))
    token = len(slots) - 1
    app.pills(key="kernels-pick-token").set_value(token).run()
    assert not app.exception
    assert f"slot **{slots[token]}**" in shown(app)
    assert f"slot_mapping[{token}] = {slots[token]}" in shown(app)
    assert address_of(app)["token"] == str(token)


def test_other_sizes_are_marked_as_what_if(mixed: Frame) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq), part="Slots")
    assert "The run's own values." in shown(app)
    app.selectbox(key="kernels-pick-kernel_block").set_value(2).run()
    assert "What if" in shown(app)
    assert "The run's own values." not in shown(app)
    app.selectbox(key="kernels-pick-ranks").set_value(2).run()
    assert {name: address_of(app)[name] for name in ("kernel_block", "ranks")} == {"kernel_block": "2", "ranks": "2"}
    assert "local offset" in shown(app)


def test_small_tiles_let_the_loop_run_several_times(mixed: Frame) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq), keys="0")
    assert "One tile: take smaller ones" in [button.label for button in app.button]
    app.button(key="kernels-smaller").click().run()
    assert not app.exception
    assert "keys" not in address_of(app)  # a block each is how a short context opens
    assert "in tiles of 4 keys" in shown(app)
    before = charts(app)
    app.button(key="kernels-on").click().run()
    assert address_of(app)["tile"] == "1"
    assert charts(app)[0] == before[0]  # the grid stays
    assert charts(app)[1] != before[1]
    assert len(charts(app)[2]["data"][0]["x"]) == len(before[2]["data"][0]["x"]) + 1


def test_as_it_ran_here_all_lanes_are_in_one_program(mixed: Frame) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq), tiles="here")
    assert "1 program with 4 lanes" in shown(app)  # two requests with two KV heads each
    grid = next(trace for trace in charts(app)[0]["data"] if "customdata" in trace)
    assert sorted(map(tuple, grid["customdata"])) == [(0, lane) for lane in range(4)]


def test_the_source_shows_counts_that_follow_from_the_grid(mixed: Frame) -> None:
    app = open_kernels(scene=SCENE, step=str(mixed.seq), part="Source", kernel="reshape_and_cache_kernel")
    event = mixed.event
    assert isinstance(event, AttentionComputed)
    tokens = sum(event.query_lens)
    listing = next(str(e.value) for e in app.get("html") if "listing" in str(e.value) and "<i>" in str(e.value))
    line = next(part for part in listing.split("<div") if "token = tl.program_id(0)" in part)
    assert f"▸ {tokens}×" in line  # a GPU has one program per token, and each runs the line once
    witness = next(part for part in listing.split("<div") if "tl.store(key_cache_ptr" in part)
    assert f"▸ {tokens}×" in witness


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("layer", "77", "layer is a number from 0 to 5"),
        ("program", "99", "program is a number from 0 to"),
        ("tiles", "big", "tiles is one of gpu, here"),
        ("part", "Nowhere", "part is one of Attention"),
        ("step", "soon", "step is the number of a frame"),
        ("step", "999999", "the last frame of this run is"),
        ("keys", "-3", "keys is one of 0, 4"),
    ],
)
def test_what_the_address_cannot_mean_gives_one_sentence_and_the_default(name: str, value: str, says: str) -> None:
    app = open_kernels(scene=SCENE, **{name: value})
    assert len(app.error) == 1
    assert says in app.error[0].value.replace("\\", "")
    assert len(charts(app)) == 3
    assert address_of(app).get(name) != value


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ({}, "the address names no scene"),
        ({"scene": "nope"}, "no scene “nope”"),
        ({"scene": "window-of-2048"}, "keeps the books only"),
        ({"scene": "figure-2"}, "no engine runs in the scene “figure-2”"),
        ({"scene": "figure-6-v1", "model": "gpt-9"}, "there is no model “gpt-9”"),
    ],
)
def test_where_no_kernel_runs_a_sentence_says_so_and_links_lead_on(address: dict[str, str], says: str) -> None:
    app = open_kernels(**address)
    assert len(app.error) == 1
    assert says.lower() in app.error[0].value.replace("\\", "").lower()
    assert "Traceback" not in app.error[0].value
    assert not charts(app)
    assert len(app.get("page_link")) >= 4


def test_a_layer_without_attention_is_named_and_one_click_leads_to_one_that_has_it() -> None:
    app = open_kernels(scene="hybrid-state-live", layer="1")
    assert not app.error
    assert "Layer 1 keeps one state for each request and has no attention" in app.info[0].value
    app.button(key="kernels-any-layer").click().run()
    assert not app.exception
    assert not app.error
    assert "Launch grid" in shown(app)


def test_where_triton_cannot_interpret_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InvalidInput("the kernels cannot be watched on this machine: Triton is not installed")

    monkeypatch.setattr("views.state.closeup_at", refuse)
    app = open_kernels(scene="figure-6-v1", keys="64", layer="3")  # a close-up that no other test asks for
    assert [error.value.replace("\\", "") for error in app.error] == ["The kernels cannot be watched on this machine: Triton is not installed."]
    assert not charts(app)
    app.button(key="kernels-any-layer").click().run()
    assert not app.exception
    assert len(app.error) == 1


def test_a_long_batch_is_shown_in_part_and_any_place_can_be_named() -> None:
    app = open_kernels(scene="figure-10", part="Slots", token="30")
    assert "37 tokens of 1 request" in shown(app)
    assert "Shown are places" in shown(app)
    assert "slot_mapping[30] =" in shown(app)
    app.number_input(key="kernels-token-number").set_value(2).run()
    assert not app.exception
    assert "slot_mapping[2] =" in shown(app)
    assert address_of(app)["token"] == "2"


def test_the_paper_s_engine_has_kernels_to_look_at_too() -> None:
    app = open_kernels(scene="figure-7", part="Slots")
    assert not app.error
    assert re.search(r"The slot-mapping kernel wrote slot \*\*\d+\*\* for this token: the same", shown(app))
