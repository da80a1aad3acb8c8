"""Figure 3 with the chosen requests: every slot of the memory, drawn to scale, at one moment of the simulation."""

from __future__ import annotations

from collections.abc import Iterator

import streamlit as st

from engine.paper.memory_integrals import MemorySnapshot
from engine.paper.reservation import CONTIGUOUS_SYSTEMS, SYSTEM_NAMES, System
from engine.paper.simulation_log import Progress
from views.figures.slot_strip import Segment, SlotKind, joined, slot_strip, slot_strip_rows
from views.screens.charts import show_chart
from views.screens.memory_settings import Settings, compared, simulated

HEIGHT = 203
ROWS = 8
PARTS: tuple[tuple[str, SlotKind], ...] = (("used", "used"), ("reserved", "reserved"), ("internal", "never used"), ("rounding", "rounding"))


def slots_part(settings: Settings, tell: Progress) -> None:
    """Two strips, contiguous above and paged below. Raises InvalidInput for settings that cannot be."""
    results = compared(settings, tell)
    chart, words = st.columns([3.4, 1], gap="medium")
    with words:
        system: System = st.radio("Contiguous system", CONTIGUOUS_SYSTEMS, format_func=SYSTEM_NAMES.__getitem__, key="memory-slots-system")
        last = max(2, min(results[system].end, results["paged"].end) - 1)
        moment = st.slider("Iteration", 1, last, (last + 1) // 2, key=f"memory-moment-{last}", help="The same iteration of both simulations.")
        place = st.container()
    with chart:
        shots = []
        for name, key in ((system, "contiguous"), ("paged", "paged")):
            snapshot = simulated(settings, name, moment, tell).snapshot
            with st.container(height=HEIGHT + 26, border=False, gap=None):
                what = "contiguous chunks" if name != "paged" else f"blocks of {settings.block_size} slots"
                st.markdown(f"**{SYSTEM_NAMES[name]}**: {what}")
                if snapshot is None:
                    st.caption("Nothing runs in this iteration.")
                    continue
                segments = joined(segments_of(snapshot))
                figure = slot_strip(segments, snapshot.num_slots, row_length(snapshot.num_slots), HEIGHT)
                show_chart(figure, slot_strip_rows(segments), f"memory-slots-{key}", alt=_counted(name, snapshot))
                shots.append((name, snapshot))
    with place:
        for name, snapshot in shots:
            st.markdown(_counted(name, snapshot))
        st.caption(
            "Read it as the paper's Figure 3: what holds a token, what is reserved for one that will come, what no token will ever use, and the holes between "
            "chunks. A number is a request's. Slots are drawn to scale, and a row goes on in the next one."
        )


def row_length(num_slots: int) -> int:
    """Slots in a row of the drawing: a power of two, so that chunks begin and end where rows do."""
    length = 1
    while length * ROWS < num_slots:
        length *= 2
    return length


def segments_of(snapshot: MemorySnapshot) -> Iterator[Segment]:
    """The memory's slots as pieces of one kind each."""
    for chunk in snapshot.chunks:
        start = chunk.start
        for field, kind in PARTS:
            length: int = getattr(chunk, field)
            yield Segment(start, length, kind, chunk.request_id)
            start += length
    for start, length in snapshot.gaps:
        yield Segment(start, length, "free")


def _counted(system: System, snapshot: MemorySnapshot) -> str:
    """How many requests and tokens there are, in a sentence."""
    requests = len({chunk.request_id for chunk in snapshot.chunks})
    used = sum(chunk.used for chunk in snapshot.chunks)
    largest = max((size for _, size in snapshot.gaps), default=0)
    holes = f"; the largest hole has {largest:,} slots" if system != "paged" and largest else ""
    percent = 100 * used / snapshot.num_slots
    return f"**{SYSTEM_NAMES[system]}**: {requests:,} requests, {used:,} of {snapshot.num_slots:,} slots hold a token ({percent:.1f} %){holes}."
