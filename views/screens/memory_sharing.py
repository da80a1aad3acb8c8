"""Figure 15 again: blocks that several outputs of one prompt save by sharing, counted while the small model runs, beside the paper's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import get_args

import streamlit as st

from engine.paper.quoted import FIGURE_15, SHARING_RANGES, Quoted
from engine.paper.sharing import parallel_sampling_saved
from engine.paper.simulation_log import Progress
from engine.sharing_runs import SharingRun, run_and_measure_sharing
from scenarios.sharing_requests import MODEL, Decoding, sharing_config, sharing_lengths, sharing_requests
from views import state
from views.figures.sharing_saved import Saving, sharing_rows, sharing_saved
from views.screens.charts import show_chart
from views.screens.memory_settings import Settings, requests_of

HEIGHT = 466
WIDTHS = (2, 4, 6)
DECODINGS: tuple[Decoding, ...] = get_args(Decoding)
WORDS: dict[Decoding, tuple[str, str]] = {"parallel_sampling": ("parallel sampling", "{} outputs"), "beam_search": ("beam search", "width {}")}


def sharing_part(settings: Settings, tell: Progress) -> None:
    """The bars; the runs are made when somebody asks for them. Raises InvalidInput for a memory or a block size that cannot be."""
    chart, words = st.columns([2, 1], gap="medium")
    runs = [(decoding, width) for decoding in DECODINGS for width in WIDTHS]
    with words:
        pressed = st.button("Run the small model and count", key="memory-share", type="primary")
        done = all(state.is_remembered(_key(decoding, width, settings.block_size)) for decoding, width in runs)
        found: dict[tuple[Decoding, int], SharingRun] = {}
        if pressed or done:
            for index, (decoding, width) in enumerate(runs):
                found[decoding, width] = _run(decoding, width, settings.block_size, lambda share, index=index: tell((index + share) / len(runs)))
        lengths = sharing_lengths()
        mean_in, mean_out = (sum(getattr(r, name) for r in lengths) / len(lengths) for name in ("prompt_len", "output_len"))
        st.caption(
            f"{'Counted in' if found else 'To be counted in'} {len(runs)} runs of the paper's engine with the model {MODEL}: {len(lengths)} prompts as long as "
            f"Alpaca's (on average {mean_in:.1f} tokens in, {mean_out:.1f} out), blocks of {settings.block_size}. Takes some ten seconds in all."
        )
        with st.container(height=HEIGHT - 140, border=False):
            st.markdown(_text())
    with chart, st.container(height=HEIGHT + 8, border=False):
        savings = [_saving(decoding, width, found.get((decoding, width)), settings) for decoding, width in runs]
        alt = ", ".join(f"{s.group} {s.setting}: {s.measured:.1f} %" for s in savings if s.measured is not None) or "not run yet"
        show_chart(sharing_saved(savings, HEIGHT), sharing_rows(savings), "memory-sharing", alt=f"Blocks saved by sharing, counted here: {alt}.")


def _key(decoding: Decoding, width: int, block_size: int) -> Hashable:
    return "sharing", decoding, width, block_size


def _run(decoding: Decoding, width: int, block_size: int, tell: Progress) -> SharingRun:
    def make() -> SharingRun:
        return run_and_measure_sharing(sharing_requests(decoding, width), sharing_config(block_size, width), MODEL, progress=tell)

    return state.remembered(_key(decoding, width, block_size), make)


def _saving(decoding: Decoding, width: int, run: SharingRun | None, settings: Settings) -> Saving:
    """One place on the axis. The arithmetic is that of the chosen requests; what beams share depends on what the model says, so it has none."""
    group, setting = WORDS[decoding]
    quoted = FIGURE_15[decoding][width]
    arithmetic = None
    if decoding == "parallel_sampling":
        key, workload = requests_of(settings)
        taken = [r for r in workload.requests if r.prompt_len + r.output_len <= settings.longest]
        arithmetic = state.remembered(
            ("shared", key, width, settings.block_size, settings.longest), lambda: parallel_sampling_saved(taken, width, settings.block_size)
        )
    each = [sharing.saved_percent for sharing in run.each] if run else []
    return Saving(
        group,
        setting.format(width),
        run.together.saved_percent if run else None,
        min(each, default=None),
        max(each, default=None),
        arithmetic,
        quoted.value,
        quoted.unconfirmed,
    )


def _text() -> str:
    """What the chart says, and what differs from the paper's set-up."""
    parallel, beams = SHARING_RANGES["parallel_sampling"], SHARING_RANGES["beam_search"]

    def span(pair: tuple[Quoted, Quoted]) -> str:
        return f"{pair[0].value} to {pair[1].value} %"

    return f"""#### What the chart says
Saved are the blocks that tables name more than once: blocks without sharing minus blocks with it, in percent of those without, over all iterations. \
Samples of one prompt share only its full blocks. Beams also share what they have said in common, and go on sharing, because survivors often have one \
parent. Requests differ much: the hint of a bar says how much.

#### What differs from the paper
- The paper ran OPT-13B. On Alpaca it reports {span(parallel["alpaca"])} for parallel sampling and {span(beams["alpaca"])} for beam search; on ShareGPT, \
with longer prompts, {span(parallel["sharegpt"])} and {span(beams["sharegpt"])} (section 6.3). The single bars are Figure 15's, read off by third parties; \
“?”: no source confirms it.
- Here a model of a few layers continues passages that it knows by heart. How sure a model is of its words decides which beams survive, and so what they \
share.
- Samples are drawn at temperature 1; every output has its request's full length; nothing is preempted.
- The arithmetic assumes the same: with it, only lengths matter."""
