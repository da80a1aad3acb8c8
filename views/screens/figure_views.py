"""What each kind of figure scene shows: its choices, its drawing, the tables beside it. One function per kind, by the kind's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import streamlit as st

from scenarios import FigureResult, FigureScene
from views import state
from views.figures.overview import overview, overview_rows
from views.figures.page_table import page_table, page_table_rows
from views.screens.charts import show_chart
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


VIEWS: dict[str, View] = {
    "overview": show_overview,
    "page_table": show_page_table,
}
