"""Figure 2 again: what the slots hold under the four systems, on the chosen requests, beside the paper's bars."""

from __future__ import annotations

import streamlit as st

from engine.paper.memory_integrals import Shares
from engine.paper.memory_simulation import SimulationResult
from engine.paper.quoted import FIGURE_2
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS, System
from engine.paper.simulation_log import Progress
from views.figures.memory_bars import MemoryShares, memory_bar_rows, memory_bars
from views.screens.charts import show_chart
from views.screens.memory_settings import MAX_NUM_SEQS, Settings, compared

HEIGHT = 466


def waste_part(settings: Settings, tell: Progress) -> None:
    """The bars, and what differs from the paper. Raises InvalidInput for settings that cannot be."""
    chart, words = st.columns([2.4, 1], gap="medium")
    with chart, st.container(height=HEIGHT + 8, border=False):
        results = compared(settings, tell)
        bars = [bar for system in SYSTEMS for bar in (here(system, results[system]), quoted(system))]
        paged = results["paged"]
        alt = ", ".join(f"{SYSTEM_NAMES[system]} {shares_of(results[system]).token_states:.1f} %" for system in SYSTEMS)
        show_chart(memory_bars(bars, HEIGHT), memory_bar_rows(bars), "memory-waste", alt=f"Share of the memory that holds token states, computed here: {alt}.")
    with words, st.container(height=HEIGHT + 8, border=False):
        best = max((s for s in SYSTEMS if s != "paged"), key=lambda s: shares_of(results[s]).token_states)
        st.markdown(
            f"#### What the bars say\nOf every 100 slots, paging has **{shares_of(paged).token_states:.1f}** in use; "
            f"{SYSTEM_NAMES[best]}, the best of the others, **{shares_of(results[best]).token_states:.1f}**. "
            "A bar is the whole KV cache, averaged over the iterations in which somebody waits: what is free then is free because nobody could use it."
        )
        _left_out(results)
        st.markdown(DIFFERENCES.format(limit=MAX_NUM_SEQS))


DIFFERENCES = """*Reserved*: for tokens still to come. *Never used*: internal fragmentation. *External*: holes between chunks, and what a chunk of a \
power of two has beyond the reservation.

#### What differs from the paper
- The paper profiled OPT-13B on a card of 40 GB while its own requests came in at a rate. Here nothing is computed but memory, on the requests above, which \
are all there from the start.
- An iteration gives each running request one token, its first one also the prompt, however long it is. At most {limit} run at once.
- vLLM's reserved and never used slots lie behind the last token of a last block.
- “?”: no source confirms this value. The paper does not split vLLM's 3.7 %."""


def shares_of(result: SimulationResult) -> Shares:
    """While somebody waits; over the whole run where nobody ever does."""
    return result.shares_while_waiting if result.times_while_waiting.iterations else result.shares


def here(system: System, result: SimulationResult) -> MemoryShares:
    """The bar that our allocators make."""
    shares = shares_of(result)
    return MemoryShares(SYSTEM_NAMES[system], "here", shares.token_states, shares.reservation, shares.internal, shares.external)


def quoted(system: System) -> MemoryShares:
    """The paper's bar. What it does not split is `rest`."""
    parts = FIGURE_2[system]
    values = {name: parts[name].value if name in parts else None for name in ("token_states", "reservation", "internal", "external")}
    told = sum(value for value in values.values() if value is not None)
    return MemoryShares(
        SYSTEM_NAMES[system],
        "paper",
        values["token_states"] or 0.0,
        values["reservation"],
        values["internal"],
        values["external"],
        round(100 - told, 1) if len(parts) == 1 else None,
        frozenset(name for name, part in parts.items() if part.unconfirmed),
    )


def _left_out(results: dict[System, SimulationResult]) -> None:
    """Requests that a system could never serve: how many, and why the first of them."""
    alike: dict[int, list[SimulationResult]] = {}
    for result in results.values():
        if result.refused:
            alike.setdefault(len(result.refused), []).append(result)
    for count, those in alike.items():
        who = "All systems leave" if len(those) == len(results) else f"{' and '.join(r.name for r in those)} {'leave' if len(those) > 1 else 'leaves'}"
        first = those[0].refused[0]
        st.caption(f"{who} out {count:,} of {count + those[0].num_requests:,} requests. The first, {first.request_id}: {first.reason}.")
