"""Terms of use that somebody must accept before a model's weights are fetched. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """What one agrees to by using a model: the name, where the text stands, what it means in two sentences, and the note that must lie beside every copy."""

    name: str
    address: str
    meaning: str
    notice: str


Accept = Callable[[Terms], bool]
"""Asks the person; True: accepted."""

GEMMA_TERMS = Terms(
    name="Gemma Terms of Use",
    address="https://ai.google.dev/gemma/terms",
    meaning=(
        "You may use, change and pass on the model, but not for anything that the law or Google's Prohibited Use Policy "
        "(https://ai.google.dev/gemma/prohibited_use_policy) forbids, and you answer for what it writes. "
        "Whoever passes it on must pass on these terms with it, and Google may withdraw the permission from those who break them."
    ),
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
)


def refuse(terms: Terms) -> bool:
    """Accepts nothing: what stands in where nobody can be asked."""
    return False
