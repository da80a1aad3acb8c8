"""How many requests fit: the batch over time under each system, and beside it what the paper measured."""

from __future__ import annotations

import streamlit as st

from engine.paper.memory_simulation import SimulationResult
from engine.paper.quoted import FIGURE_13
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS
from engine.paper.simulation_log import Progress
from views.figures.batch_over_time import BatchLine, batch_over_time, batch_rows
from views.screens.charts import show_chart
from views.screens.memory_settings import MAX_NUM_SEQS, Settings, compared

HEIGHT = 466
PAPER_SET = {"sharegpt-like": "sharegpt", "alpaca-like": "alpaca"}
PAPER_NAMES = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}


def batch_part(settings: Settings, tell: Progress) -> None:
    """The lines, and a table of means. Raises InvalidInput for settings that cannot be."""
    chart, words = st.columns([2.4, 1], gap="medium")
    with chart, st.container(height=HEIGHT + 8, border=False):
        results = compared(settings, tell)
        lines = [BatchLine(results[system].name, results[system].batch_sizes, _mean(results[system])) for system in SYSTEMS]
        show_chart(batch_over_time(lines, HEIGHT), batch_rows(lines), "memory-batch", alt=" ".join(_sentence(results[s]) for s in SYSTEMS))
    with words, st.container(height=HEIGHT + 8, border=False):
        data_set = PAPER_SET.get(settings.workload)
        st.markdown("#### Requests running, on average\n" + _table({s: results[s] for s in SYSTEMS}, data_set))
        slowest, paged = results["orca_max"], results["paged"]
        if slowest.num_requests and paged.num_requests:
            st.markdown(
                f"The more requests share an iteration, the fewer iterations all of them take: {paged.num_iterations:,} with paging, "
                f"{slowest.num_iterations:,} with {slowest.name}. An iteration with more requests takes longer, so this is not yet a gain in speed."
            )
        st.markdown(
            "#### What differs from the paper\n"
            "- There, requests came in at a rate; here, all wait from the start.\n"
            f"- At most {MAX_NUM_SEQS} requests run at once, whatever fits.\n"
            f"- When blocks run out, paging preempts: {paged.num_preemptions:,} times in this run. What was preempted is computed again in one iteration."
        )


def _table(results: dict[str, SimulationResult], data_set: str | None) -> str:
    """Means here, while somebody waits, and the paper's where it has some."""
    head = f"| | here | paper, {PAPER_NAMES[data_set]} |\n|---|--:|--:|\n" if data_set else "| | here |\n|---|--:|\n"
    rows = []
    for system, result in results.items():
        row = f"| {SYSTEM_NAMES[system]} | {_mean(result):.1f} |"
        rows.append(row + (f" {FIGURE_13[data_set][system].value:.2f} |" if data_set else ""))
    source = "\n\nPaper: Figure 13, read off by third parties." if data_set else ""
    return head + "\n".join(rows) + source


def _mean(result: SimulationResult) -> float:
    return result.mean_batch_size_while_waiting or result.mean_batch_size


def _sentence(result: SimulationResult) -> str:
    return f"{result.name} runs {_mean(result):.1f} requests at once on average."
