"""What each kind of figure scene shows: its choices, its drawing, the tables beside it. One function per kind, by the kind's name."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TypeAlias

import streamlit as st

from engine.errors import PagewalkError
from scenarios import FigureResult, FigureScene
from views import state
from views.figures.batching import batching, batching_rows, doing, idle_places
from views.figures.kv_bytes import kv_bytes, kv_bytes_rows, kv_formula
from views.figures.memory_layout import memory_layout_rows, memory_of_batch, memory_of_batch_rows, memory_split
from views.figures.memory_waste import memory_waste, memory_waste_rows
from views.figures.overview import overview, overview_rows
from views.figures.page_table import page_table, page_table_rows
from views.figures.reservation_strips import reservation_rows, reservation_strips
from views.screens.charts import show_chart
from views.screens.gallery import sentence
from views.screens.tables import table

View: TypeAlias = Callable[[FigureScene, FigureResult, Mapping[str, str]], None]


def show_overview(scene: FigureScene, result: FigureResult, links: Mapping[str, str]) -> None:
    """The boxes; their names lead to the scenes that show them at work."""
    show_chart(overview(result.data, links), overview_rows(result.data), scene.id, alt=f"{scene.goal} Arrows: {result.values['arrows']}.")
    st.caption("Names with ▸ lead to the scene in which that part can be watched at work.")


@st.fragment
def show_page_table(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """Both lookups, moved by one slider, and the list of counterparts."""
    position = st.slider(
        "Token position (and the address beside it)", 0, len(result.data["tokens"]) - 1, scene.parameters.get("position", 0), key=f"at-{scene.id}"
    )
    result = state.figure_result(scene.id, (("position", position),))
    data = result.data
    said = f"Position {position} is in block {data['physical_block']}, slot {data['slot']}; address {data['virtual_address']} is in frame {data['frame']}."
    show_chart(page_table(data), page_table_rows(data), scene.id, alt=said)
    marks = {"same": "=  the same", "similar": "≈  similar", "none": "–  none"}
    rows = [[c["system"], c["cache"], marks[c["match"]], c["say"]] for c in data["counterparts"]]
    table(["In an operating system", "In the KV cache", "Counterpart", "What is alike, what is not"], rows, words=(0, 1, 2, 3))


@st.fragment
def show_memory_layout(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """The card and the batch, for a model and a card of one's choice; under them the paper's Table 1."""
    places = st.columns([1.2, 1.2, 2.6], gap="small")
    shape = places[0].selectbox("Model", SHAPES, SHAPES.index(scene.parameters["shape"]), key=f"shape-{scene.id}")
    card = places[1].selectbox("Memory of the card(s)", CARDS, CARDS.index(scene.parameters["card_gb"]), key=f"card-{scene.id}", format_func="{} GB".format)
    try:
        result = state.figure_result(scene.id, (("card_gb", card), ("shape", shape)))
    except PagewalkError as error:
        st.error(sentence(str(error)), icon=":material/error:")
        return
    data, values = result.data, result.values
    left, right = st.columns([0.44, 0.56], gap="small")
    said = f"Parameters {values['percent.parameters']:.1f} %, KV cache {values['percent.kv_cache']:.1f} %, rest {values['percent.rest']:.1f} % of {card} GB."
    with left:
        show_chart(memory_split(data), memory_layout_rows(data), f"{scene.id}-card", alt=said)
    fit = f"{values['contiguous.max_requests']} requests fit with reservation, {values['paged.max_requests']} in blocks."
    with right:
        show_chart(memory_of_batch(data), memory_of_batch_rows(data), f"{scene.id}-batch", alt=fit)
    rows = []
    for name, ours in data["table_1"].items():
        paper = data["paper_table_1"][name]
        sizes = [f"{paper['gpu_gb']:.0f} GB", f"{paper['parameters_gb']:.0f} GB", f"{ours['parameters_gb']:.1f} GB", f"{paper['kv_cache_gb']:.0f} GB"]
        rows.append([name, *sizes, f"{paper['num_slots'] / 1000:.1f}K", f"{ours['num_slots']:,}"])
    columns = ["Table 1", "GPU memory (paper)", "Parameters (paper)", "computed", "KV cache (paper)", "Slots (paper)", "computed"]
    table(columns, rows)


@st.fragment
def show_kv_bytes(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """The product for one shape, and all shapes side by side."""
    shapes = result.data["shapes"]
    name = st.segmented_control("Model", [s["name"] for s in shapes], default=shapes[0]["name"], required=True, key=f"shape-{scene.id}")
    shape = next((s for s in shapes if s["name"] == name), shapes[0])
    said = f"{shape['name']}: {shape['bytes_per_token']:,} bytes per token, {shape['bytes_per_request']:,} per request."
    show_chart(kv_formula(shape, result.data["request_tokens"]), kv_bytes_rows([shape]), f"{scene.id}-formula", alt=said)
    if shape["paper"]:
        token, request = result.values["paper.kb_per_token"], result.values["paper.gb_per_request"]
        st.caption(f"The paper prints {token:g} KB per token and {request:g} GB per request ({result.quoted['paper.kb_per_token']}).")
    else:
        st.caption(f"Shape: {shape['source']}.")
    show_chart(kv_bytes(shapes), kv_bytes_rows(shapes), scene.id, alt="; ".join(f"{s['name']} {s['bytes_per_token']:,} bytes per token" for s in shapes))


def show_memory_waste(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """Four systems, each beside the paper's bar; the sums and the requests at a time under them."""
    data, values = result.data, result.values
    said = "; ".join(f"{bar['system']}: {bar['ours']['token_states']:.1f} % token states, paper {bar['paper']['token_states']} %" for bar in data["bars"])
    show_chart(memory_waste(data), memory_waste_rows(data), scene.id, alt=said)
    rows = [
        [
            bar["system"],
            f"{values[bar['name'] + '.sum']:.1f} %",
            "–" if bar["name"] == "paged" else f"{values['paper.' + bar['name'] + '.sum']:.1f} %",
            f"{values[bar['name'] + '.mean_batch_size']:.2f}",
            f"{values['paper.' + bar['name'] + '.mean_batch_size']:.2f}",
        ]
        for bar in data["bars"]
    ]
    columns = ["System", "Parts add up to", "the paper's parts", "Requests at a time", "paper, Figure 13 (read off by others)"]
    table(columns, rows)
    lengths = f"{values['num_requests']:,} requests, on average with {values['mean_prompt']:.0f} prompt and {values['mean_output']:.0f} output tokens"
    st.caption(f"Here: {lengths}. {data['workload']['note']}")


@st.fragment
def show_reservation_strips(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """The strips, with blocks of 4 or 16 under them."""
    size = st.segmented_control("Block size", [4, 16], default=scene.parameters["block_size"], required=True, key=f"block-size-{scene.id}")
    result = state.figure_result(scene.id, (("block_size", size),))
    said = "; ".join(f"{c['id']}: {c['prompt']} prompt, {c['now']} now, {c['later']} later, {c['never']} never used" for c in result.data["chunks"])
    show_chart(reservation_strips(result.data), reservation_rows(result.data), scene.id, alt=said)


@st.fragment
def show_batching(scene: FigureScene, result: FigureResult, _: Mapping[str, str]) -> None:
    """Both schedules, with one iteration marked and told in words."""
    data = result.data
    last = max(data["request"]["end"], data["iteration"]["end"]) - 1
    iteration = st.slider("Iteration", 0, last, 3, key=f"iteration-{scene.id}")
    show_chart(batching(data, iteration), batching_rows(data), scene.id, alt=scene.goal)
    told = ""
    for policy in ("request", "iteration"):
        found = doing(data, policy, iteration)
        words = "; ".join(f"{_listed(ids)} {SAID[what]}" for what, ids in found.items()) or "everybody is done"
        idle = idle_places(data, policy, iteration) if iteration < data[policy]["end"] else data["max_batch_size"]
        told += f"<p><b>{data[policy]['name']}</b>, iteration {iteration}: {html.escape(words)}. Idle places: {idle} of {data['max_batch_size']}.</p>"
    st.html(f'<div class="told">{told}</div>')


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


SHAPES = ["OPT-13B", "OPT-66B", "OPT-175B", "LLaMA-13B"]
CARDS = [24, 40, 80, 160, 320, 640]
SAID = {"prompt": "(prompt)", "decode": "(next token)", "padding": "(padding)", "waits": "(waiting)"}

VIEWS: dict[str, View] = {
    "memory_layout": show_memory_layout,
    "kv_bytes": show_kv_bytes,
    "memory_waste": show_memory_waste,
    "reservation_strips": show_reservation_strips,
    "overview": show_overview,
    "batching": show_batching,
    "page_table": show_page_table,
}
