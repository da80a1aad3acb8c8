"""A chart with its two ways out: “SVG” saves the drawing as it stands (in the browser, nothing is sent), “CSV” saves the numbers behind it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

STYLE = """<style>
.CHART { position: relative; gap: 0 !important; }
.CHART .modebar-container { top: 4px !important; right: 50px !important; left: auto !important; width: auto !important; height: 26px !important; }
.CHART .modebar, .CHART .modebar-group { opacity: 1 !important; background: none !important; padding: 0 !important; position: static !important; }
.CHART .modebar-btn { width: 44px !important; height: 24px !important; padding: 0 !important; display: flex !important; align-items: center;
  justify-content: center; color: inherit; background: none !important; box-sizing: border-box; border-radius: 6px;
  border: 1px solid color-mix(in srgb, currentColor 26%, transparent) !important; }
.CHART .modebar-btn:hover { border-color: currentColor !important; }
.CHART .modebar-btn > svg { display: none; }
.CHART .modebar-btn::after { display: none !important; }
.CHART .modebar-btn::before { all: unset !important; content: "SVG" !important; font: 600 11.5px system-ui, sans-serif !important; }
.CHART .stElementContainer:has([data-testid="stDownloadButton"]) { position: absolute; top: 2px; right: 2px; width: 44px !important; z-index: 3; }
.CHART [data-testid="stDownloadButton"] button { min-height: 24px; height: 24px; width: 44px; padding: 0; background: none; border-radius: 6px;
  border: 1px solid color-mix(in srgb, currentColor 26%, transparent); }
.CHART [data-testid="stDownloadButton"] button p { font: 600 11.5px system-ui, sans-serif; }
.CHART svg a, .CHART svg a * { fill: currentColor !important; text-decoration: underline; }
.CHART [data-testid="stElementToolbar"] { display: none; }
</style>""".replace(".CHART", '[class*="st-key-chart-"]')


INK, INK_ON_DARK = "#1b2430", "#e8edf4"


def show_chart(figure: go.Figure, rows: Sequence[Mapping[str, Any]], name: str, *, alt: str | None = None, on_click: Callable[[], None] | None = None) -> None:
    """Draw `figure` with an SVG and a CSV button in its top right corner, which wants to stay free (96 x 26 pixels).

    `rows`: the numbers behind the drawing, one mapping per line of the CSV, its columns in the order in which they first appear. `name`: of the files, and the
    chart's key: one chart of a name per page. `alt`: the chart in words, for those who cannot see it.
    `on_click`: called before the next run of the page when somebody clicks a point; `state.clicked` says which.
    """
    st.html(STYLE)
    with st.container(key=f"chart-{name}"):
        st.plotly_chart(
            inked(figure), key=f"plot-{name}", config=plot_config(name), alt=alt, on_select=on_click or "ignore", selection_mode="points"
        )  # fmt: skip
        st.download_button("CSV", csv_text(rows), f"{name}.csv", "text/csv", key=f"csv-{name}", on_click="ignore")


def inked(figure: go.Figure) -> go.Figure:
    """The figure with words in the page's own colour wherever they have none: Streamlit's theme would print them in a pale grey. Changes the figure."""
    ink = INK_ON_DARK if st.context.theme.type == "dark" else INK
    words = figure.to_plotly_json()["layout"].get("annotations", [])  # all at once: Plotly takes a millisecond for each single change
    figure.update_layout(
        annotations=[{**a, "font": {"color": ink, **a.get("font", {})}} for a in words],
        font_color=ink,
        legend_font_color=ink,
    )
    figure.update_xaxes(tickfont_color=ink, title_font_color=ink)
    figure.update_yaxes(tickfont_color=ink, title_font_color=ink)
    return figure


def plot_config(name: str) -> dict[str, Any]:
    """Plotly's settings: one button, which saves the chart as SVG; no zooming with the wheel."""
    return {
        "displayModeBar": True,
        "displaylogo": False,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": {"format": "svg", "filename": name},
        "scrollZoom": False,
        "doubleClick": "reset",
    }


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header line (RFC 4180). A text that a spreadsheet would take for a formula gets an apostrophe in front."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({column: _plain(value) for column, value in row.items()} for row in rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
