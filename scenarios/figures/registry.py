"""The kinds of figures: for each the model of its parameters and the function that computes it. Its drawing has the kind's name, in `views/figures`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scenarios.figures import overview, page_table
from scenarios.figures.schema import FigureResult, Part


@dataclass(frozen=True)
class Kind:
    """One kind of figure. `compute` takes an instance of `parameters` and raises InvalidInput for parameters that do not go together."""

    parameters: type[Part]
    compute: Callable[[Any], FigureResult]
    says: str


KINDS: dict[str, Kind] = {
    "overview": Kind(overview.Parameters, overview.compute, "who talks to whom"),
    "page_table": Kind(page_table.Parameters, page_table.compute, "an operating system's page table beside a block table"),
}
