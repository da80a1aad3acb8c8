"""The look of the kernels screen, and small things that its parts share."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

import streamlit as st

STYLE = """<style>
header[data-testid="stHeader"] { display: none; }
.stMainBlockContainer { padding: 8px 24px 16px !important; max-width: 1440px !important; margin: 0 auto; }
.stMainBlockContainer > .stVerticalBlock { gap: 4px; }
.stMainBlockContainer h1 { font-size: 19px; padding: 0; line-height: 30px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.st-key-kernels-head, .st-key-kernels-controls { align-items: center; flex-wrap: nowrap; }
.st-key-kernels-head > div:first-child { flex: 1 1 0; min-width: 0; }
.st-key-kernels-head a, .st-key-kernels-head button { border: 1px solid color-mix(in srgb, currentColor 22%, transparent); border-radius: 8px; margin: 0;
  min-height: 30px; padding: 2px 10px; }
.st-key-kernels-head p { font-size: 13px; white-space: nowrap; }
.st-key-kernels-controls { min-height: 42px; }
.st-key-kernels-controls > div:last-child { flex: 1 1 0; min-width: 0; }
.st-key-kernels-status [data-testid="stMarkdownContainer"] p { font-size: 13px; line-height: 18px; }
.st-key-kernels-status [data-testid="stAlertContainer"] { padding: 6px 12px; min-height: 0; }
.stMainBlockContainer [data-testid="stTabs"] [role="tabpanel"] { padding-top: 8px; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] :is(p, li) { font-size: 13.5px; line-height: 18.5px; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] ul { padding-left: 16px; margin: 0; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] li { margin: 0 0 3px; padding: 0; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] code { font-size: 12.5px; }
[data-testid="stTabs"] [data-testid="stCaptionContainer"] p { font-size: 13px; line-height: 18px; }
[data-testid="stTabs"] .stVerticalBlock { gap: 6px; }
[data-testid="stTabs"] label p { font-size: 13px; }
.st-key-kernels-loop button { min-height: 32px; padding: 2px 10px; }
.st-key-kernels-tokens button p { font-size: 13px; }
table.numbers, table.sum { border-collapse: collapse; font-size: 13.5px; line-height: 19px; }
table.numbers :is(td, th), table.sum :is(td, th) { padding: 2px 10px 2px 0; text-align: right; font-variant-numeric: tabular-nums; vertical-align: top;
  border-bottom: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
table.numbers .words, table.sum td:not(:nth-child(3)) { text-align: left; }
table.sum td:nth-child(2), table.sum td:nth-child(3) { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; font-size: 13px; }
table.sum td:not(:last-child) { white-space: nowrap; }
table.sum td:nth-child(3) { font-weight: 700; }
table.sum td:last-child { opacity: .82; font-size: 13px; }
table.sum tr:last-child td { border-bottom: 0; font-weight: 700; opacity: 1; }
dl.words, dl.words div { margin: 0; padding: 0; }
dl.words { font-size: 13px; line-height: 17.5px; }
dl.words div { margin-bottom: 3px; } dl.words dt { display: inline; font-weight: 700; } dl.words dd { display: inline; margin: 0; padding: 0; }
dl.words dt::after { content: ": "; }
ol.programs { display: flex; flex-wrap: wrap; gap: 6px; list-style: none; margin: 2px 0 0; padding: 0; font-size: 13px; line-height: 17px; max-height: 128px;
  overflow-y: auto; }
ol.programs li { border: 1px solid color-mix(in srgb, currentColor 35%, transparent); border-radius: 6px; padding: 3px 8px; margin: 0; }
ol.programs li b { display: block; }
ol.programs li.pad { border-style: dashed; }
ol.constants { max-height: none; }
.listing summary { cursor: pointer; padding: 2px 0 4px 8px; font-family: var(--st-font, system-ui), system-ui, sans-serif; font-size: 13px; }
.listing { font: 12.5px/17px ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; width: max-content; min-width: 100%; }
.listing div { display: flex; white-space: pre; }
.listing i { font-style: normal; width: 44px; text-align: right; padding-right: 8px; opacity: .75; }
.listing b { width: 58px; text-align: right; padding-right: 8px; font-weight: 700; border-right: 3px solid transparent; margin-right: 8px; }
.listing .ran { background: color-mix(in srgb, #f0b429 13%, transparent); } .listing .ran b { border-right-color: #f0b429; }
.listing .skipped { opacity: .72; } .listing .skipped b { font-weight: 400; }
.stElementContainer { opacity: 1 !important; transition: none !important; }
[data-stale="true"] { opacity: .35 !important; transition: opacity .2s ease .7s !important; }
</style>"""


def explain(words: Mapping[str, str]) -> None:
    """A short list of words and what they mean."""
    body = "".join(f"<div><dt>{html.escape(word)}</dt><dd>{html.escape(says)}</dd></div>" for word, says in words.items())
    st.html(f'<dl class="words">{body}</dl>')


def calculation(rows: Iterable[Sequence[str]]) -> None:
    """A worked calculation: name, formula, result, and what it is in words."""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    st.html(f'<table class="sum"><tbody>{body}</tbody></table>')


def visible(text: str) -> str:
    """The text of a token, with something to see also where it is white space."""
    return text.replace("\n", "⏎").strip() or "␣"


def escaped(text: str) -> str:
    """`visible` for Markdown: characters that it would take for formatting are escaped."""
    shown = visible(text)
    return "".join("\\" + c if c in "\\*_#[]<>$~`:|-+.!()" else c for c in shown)
