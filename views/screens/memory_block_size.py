"""Figure 18 again: what larger blocks waste, computed on the chosen requests, and what they cost the kernels, measured on this machine."""

from __future__ import annotations

import statistics
from dataclasses import replace

import streamlit as st

from engine.libraries import load_libraries
from engine.paper.quoted import BLOCK_SIZE_NOTES
from engine.paper.simulation_log import Progress
from views import state
from views.figures.block_size_sweep import CostAtBlockSize, WasteAtBlockSize, block_size_rows, block_size_sweep
from views.screens.charts import show_chart
from views.screens.memory_settings import BLOCK_SIZES, Settings, requests_of, simulated

HEIGHT = 466
BATCH = 8
LONGEST_MEASURED = 1024
MAX_REQUESTS = 2_000
"""More change nothing that can be seen, and nine simulations of them would take their time."""
BACKENDS = {"torch": "torch reference", "interpret": "Triton, interpreted"}


def block_size_part(settings: Settings, tell: Progress) -> None:
    """Waste and cost over block sizes. Raises InvalidInput for settings that cannot be."""
    chart, words = st.columns([2, 1], gap="medium")
    with words:
        backend = st.radio("Kernels to measure", list(BACKENDS), format_func=BACKENDS.__getitem__, key="memory-backend", horizontal=True)
        pressed = st.button("Measure the kernels here", key="memory-measure", type="primary")
        lengths = sample_lengths(settings)
        key = ("kernel cost", backend, lengths)
        costs = state.remembered(key, lambda: _measure(backend, lengths, tell)) if pressed or state.is_remembered(key) else []
        st.caption(_described(backend, lengths, bool(costs)))
        with st.container(height=HEIGHT - 240, border=False):
            st.markdown(TEXT.format(**BLOCK_SIZE_NOTES, requests=_first_ones(settings)))
    with chart, st.container(height=HEIGHT + 8, border=False):
        waste = waste_of(replace(settings, num_requests=min(settings.num_requests, MAX_REQUESTS)), tell)
        figure = block_size_sweep(waste, costs, settings.block_size, HEIGHT)
        alt = ", ".join(f"{w.block_size}: {w.percent:.1f} %" for w in waste)
        show_chart(figure, block_size_rows(waste, costs), "memory-block-size", alt=f"Slots of allocated blocks that stay empty, by block size: {alt}.")


TEXT = """#### What the charts say
A block's empty slots lie behind a request's last token, half a block on average: larger blocks waste more, most of all with short requests. {requests}

#### What differs from the paper
- {sharegpt} {alpaca} {default} That was the latency of a whole serving system.
- Its GPU kernel goes through the cache block by block, which small blocks make slow. A GPU's curve differs from this one.
- Ours reads a tile of tokens at once and looks up the block of each: its time hardly depends on the block size. Copying one block, \
as copy-on-write does, takes longer the larger it is."""


def waste_of(settings: Settings, tell: Progress) -> list[WasteAtBlockSize]:
    """For every block size: percent of the slots of allocated blocks that hold no token, averaged over time."""
    found = []
    sizes = [size for size in BLOCK_SIZES if size <= settings.num_slots]
    for done, size in enumerate(sizes):
        times = simulated(replace(settings, block_size=size), "paged", progress=lambda share, done=done: tell((done + share) / len(sizes))).times
        allocated = times.token_states + times.reservation + times.internal
        found.append(WasteAtBlockSize(size, 100 * (times.reservation + times.internal) / allocated if allocated else 0.0))
    return found


def sample_lengths(settings: Settings) -> tuple[int, ...]:
    """Lengths of a batch that is like the chosen requests halfway through their outputs: the middles of equally many of them, from the shortest on."""
    _, workload = requests_of(settings)
    lengths = [min(r.prompt_len + (r.output_len + 1) // 2, LONGEST_MEASURED) for r in workload.requests]
    if len(lengths) < BATCH:
        return tuple(sorted(lengths))
    return tuple(round(q) for q in statistics.quantiles(lengths, n=2 * BATCH)[::2])


def _first_ones(settings: Settings) -> str:
    return f"Computed on the first {MAX_REQUESTS:,} requests." if settings.num_requests > MAX_REQUESTS else ""


def _measure(backend: str, lengths: tuple[int, ...], tell: Progress) -> list[CostAtBlockSize]:
    """In microseconds. Only now torch is needed, which takes a while to load."""
    load_libraries()
    from engine.worker.block_size_cost import measure_block_sizes

    costs = measure_block_sizes(BLOCK_SIZES, lengths, backend, tell)
    return [CostAtBlockSize(c.block_size, 1e6 * c.attention_seconds, 1e6 * c.copy_seconds) for c in costs]


def _described(backend: str, lengths: tuple[int, ...], done: bool) -> str:
    what = "Measured" if done else "To be measured"
    return (
        f"{what} on this machine's CPU ({BACKENDS[backend]}): one layer of the small model, one token each for {len(lengths)} requests with "
        f"{', '.join(map(str, lengths))} tokens in the cache, like the chosen ones halfway. The fastest of several rounds counts."
    )
