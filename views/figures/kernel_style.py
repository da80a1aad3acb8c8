"""What the pictures of the kernels screen have in common: a request's colour, which always comes with its name, and small English for numbers and runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from views.figures.canvas import GREY, Fill

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8568f", "#7a6a00", "#1f86c4", "#8c5a2b")
"""The stage's colours of requests, in order of arrival."""

MASKED = Fill("masked", GREY, "x", 0.10)
SKIPPED = Fill("outside the window", GREY, "/", 0.16)
ELSEWHERE = Fill("another program's", GREY, "-", 0.10)
TO_COME = Fill("read later", GREY, "", 0.06)


def request_colours(request_ids: Sequence[str]) -> dict[str, str]:
    """A colour for each request, in order of arrival, as on the stage."""
    return {request_id: PALETTE[i % len(PALETTE)] for i, request_id in enumerate(request_ids)}


def colour_of(colours: Mapping[str, str], request_id: str | None) -> str:
    """The request's colour; grey for nobody's."""
    return colours.get(request_id or "", GREY)


def short_name(request_id: str) -> str:
    """A name that fits into a cell: a long one is its first letter, as on the stage."""
    return request_id if len(request_id) <= 2 or re.fullmatch(r"[^\W\d_]\d\d", request_id) else request_id[0].upper()


def plural(number: int, noun: str) -> str:
    """“1 key”, “2 keys”."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(first: int, end: int) -> str:
    """The numbers from `first` up to, but without, `end`: “4”, or “4 to 7”."""
    return f"{first:,}" if end - first == 1 else f"{first:,} to {end - 1:,}"


def listed(parts: Sequence[str], most: int = 8) -> str:
    """“a”, “a and b”, “a, b and c”; of very many the first `most` and how many more."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most:,} more"
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def number(value: float) -> str:
    """A number as a person reads it: four digits that count."""
    if value == 0:
        return "0"
    size = abs(value)
    text = f"{value:,.0f}" if 1000 <= size < 100_000 else f"{value:.4g}" if 0.0001 <= size < 1000 else f"{value:.2e}"
    return text.replace("-", "−", 1) if value < 0 else text
