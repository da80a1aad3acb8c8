"""Small tables of words and numbers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import streamlit as st


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> None:
    """A table whose columns named in `words` hold words, set from the left; the others hold numbers. Texts are shown as they are, never as HTML."""
    head = "".join(f"<th{_class(i, words)}>{html.escape(c)}</th>" for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(f"<td{_class(i, words)}>{html.escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    st.html(f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _class(column: int, words: Sequence[int]) -> str:
    return ' class="words"' if column in words else ""
