"""Figure 2 of the paper beside what was simulated here: bars for the eye, rows for the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.memory_bars import MemoryShares, memory_bar_rows, memory_bars

PARTS = ("token_states", "reservation", "internal", "external")


def memory_waste(data: Mapping[str, Any], height: int = 430) -> go.Figure:
    """Per system what came out here, and under it the paper's bar; unconfirmed values bear a “?”."""
    return memory_bars(_bars(data), height)


def memory_waste_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """The bars' numbers."""
    return memory_bar_rows(_bars(data))


def _bars(data: Mapping[str, Any]) -> list[MemoryShares]:
    bars: list[MemoryShares] = []
    for bar in data["bars"]:
        ours, paper = bar["ours"], bar["paper"]
        bars.append(MemoryShares(bar["system"], "here", ours["token_states"], ours["reservation"], ours["internal"], ours["external"]))
        known = [paper.get(part) for part in PARTS]
        rest = 100 - paper["token_states"] if bar["name"] == "paged" else 0.0
        bars.append(MemoryShares(bar["system"], "paper", known[0] or 0.0, known[1], known[2], known[3], rest, frozenset(bar["unconfirmed"])))
    return bars
