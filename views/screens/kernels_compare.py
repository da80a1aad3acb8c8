"""The torch reference beside the Triton kernel: what each of them put out for a token, and how far apart they are over the whole batch."""

from __future__ import annotations

import streamlit as st

from views import state
from views.figures.kernel_compare import comparison_words, difference_map, difference_rows, largest_difference
from views.figures.kernel_style import plural
from views.screens.charts import show_chart
from views.screens.kernels_choice import choose, widget
from views.screens.kernels_look import visible
from views.screens.kernels_view import View
from views.screens.tables import table

HEIGHT = 430


def compare_part(view: View) -> None:
    """The map of differences, and the numbers of one token and head."""
    comparison, tokens = view.closeup.comparison, view.tokens
    if not comparison.difference:
        st.info("Nothing was compared: the batch has no tokens in this layer.")
        return
    top = largest_difference(comparison)
    token = view.choices.pick("token", range(len(tokens)), top.token)
    head = view.choices.pick("head", range(view.closeup.num_q_heads), top.q_head)
    names = [token.name for token in tokens]
    chart, words = st.columns([1.7, 1], gap="medium")
    with chart:
        said = comparison_words(comparison, names)
        st.markdown(
            "Attention of this layer, computed twice: by plain torch (reference) and by the Triton kernel. **How far apart** they are for each token and query "
            "head: the darker, the further; in a cell the power of ten that the difference stays below. Blank or 0: no difference. Click a cell."
        )
        figure = difference_map(comparison, names, (token, head), HEIGHT)
        show_chart(figure, difference_rows(comparison, names), "kernels-difference", alt=said, on_click=_clicked)
        st.markdown(said)
    with words:
        places = st.columns([1.6, 1], gap="small")
        places[0].selectbox("Token", range(len(tokens)), key=widget("token"), format_func=lambda i: f"{tokens[i].name} {visible(tokens[i].text)}")
        places[1].selectbox("Query head", range(view.closeup.num_q_heads), key=widget("head"))
        shown = zip(comparison.reference[token][head], comparison.triton[token][head], strict=True)
        rows = [[str(k), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}" if a != b else "0"] for k, (a, b) in enumerate(shown)]
        st.markdown(f"**The first {comparison.num_shown} of {plural(comparison.head_dim, 'number')}** that attention puts out here")
        table(["", "reference", "Triton", "difference"], rows)
        st.markdown(f"Over all {comparison.head_dim} numbers the largest difference is **{comparison.difference[token][head]:.2e}**.")
        _tolerance(view)


def _tolerance(view: View) -> None:
    """Which differences are to be expected, and what the run itself found."""
    checked = ""
    if view.agrees_within is not None:
        layers = ", ".join(map(str, view.compared_layers))
        checked = (
            f" While this run was recorded, with the tiles that it had then, layer{'s' if len(view.compared_layers) > 1 else ''} {layers} agreed within "
            f"{view.agrees_within:g}; other tiles, other last digits."
        )
    st.caption(
        "Both compute in float32, but add in another order: the reference takes all keys at once, the kernel tile by tile. Each number has some seven "
        "digits, so a difference of 1e-7 for a number near 1 is the last one. The tests allow 2e-6, and one part in 100,000 of the value, "
        "against a reference in float64." + checked
    )


def _clicked() -> None:
    if place := state.clicked("kernels-difference"):
        choose("token", place[0])
        choose("head", place[1])
