"""The kinds of figures: for each the model of its parameters and the function that computes it. Its drawing has the kind's name, in `views/figures`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scenarios.figures import batching, kv_bytes, memory_layout, memory_waste, overview, page_table, reservation_strips
from scenarios.figures.schema import FigureResult
from scenarios.scene import Part


@dataclass(frozen=True)
class Kind:
    """One kind of figure. `compute` takes an instance of `parameters` and raises InvalidInput for parameters that do not go together."""

    parameters: type[Part]
    compute: Callable[[Any], FigureResult]
    says: str


KINDS: dict[str, Kind] = {
    "memory_layout": Kind(memory_layout.Parameters, memory_layout.compute, "where a card's memory goes, from a model's shape"),
    "kv_bytes": Kind(kv_bytes.Parameters, kv_bytes.compute, "what one token costs in models of several shapes"),
    "memory_waste": Kind(memory_waste.Parameters, memory_waste.compute, "what the KV memory of four systems holds on one workload"),
    "reservation_strips": Kind(reservation_strips.Parameters, reservation_strips.compute, "requests in contiguous chunks and in blocks, slot by slot"),
    "overview": Kind(overview.Parameters, overview.compute, "who talks to whom"),
    "page_table": Kind(page_table.Parameters, page_table.compute, "an operating system's page table beside a block table"),
    "batching": Kind(batching.Parameters, batching.compute, "request-level and iteration-level batching of the same arrivals"),
}
