"""A figure scene: title and goal, the figure with its choices, and beside it what there is to say about it."""

from __future__ import annotations

import html
from collections.abc import Iterable

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from scenarios import FigureResult, FigureScene, SceneInfo
from scenarios.figures.schema import FigureLink
from views import state
from views.screens.figure_views import VIEWS
from views.screens.neighbours import neighbours

STYLE = """<style>
header[data-testid="stHeader"] { display: none; }
.stMainBlockContainer { padding: 10px 24px 28px !important; max-width: 1360px !important; margin: 0 auto; }
.stMainBlockContainer > .stVerticalBlock { gap: 6px; }
.figure-head h1 { font-size: 21px; font-weight: 680; margin: 0; padding: 0; line-height: 30px; }
.figure-head p { margin: 0; font-size: 14.5px; line-height: 20px; }
.figure-head small, .figure-side small { color: color-mix(in srgb, currentColor 66%, transparent); font-size: 12.5px; }
.st-key-figure-nav { width: auto !important; flex-wrap: nowrap; align-items: center; justify-content: flex-end; gap: 6px !important; }
.st-key-figure-nav a { min-height: 30px !important; height: 30px; padding: 2px 10px !important; border-radius: 8px; margin: 0; background: none !important;
  border: 1px solid color-mix(in srgb, currentColor 22%, transparent); }
.st-key-figure-nav p { font-size: 13px !important; font-weight: 500; white-space: nowrap; }
.told p { margin: 0; font-size: 13.5px; line-height: 19px; }
.figure-side { font-size: 14px; line-height: 19.5px; }
.figure-side ol { margin: 0; padding-left: 19px; } .figure-side li { margin-bottom: 7px; padding: 0; font-size: 14px; }
.figure-side h2 { font-size: 13px; font-weight: 650; margin: 10px 0 4px; padding: 0; opacity: .75; }
.figure-side a { color: inherit; text-decoration: underline; text-underline-offset: 2px; }
.figure-side ul { list-style: none; margin: 0; padding: 0; } .figure-side ul li::before { content: "▸ "; opacity: .6; }
.read { border: 1px solid color-mix(in srgb, currentColor 22%, transparent); border-left: 4px solid #d55e00; border-radius: 8px;
  padding: 7px 11px; margin-top: 8px; }
.read b { font-size: 12.5px; } .read p { margin: 0 0 4px; font-size: 13.5px; line-height: 18px; }
.tag { font-size: 11.5px; font-weight: 600; border: 1px dashed currentColor; border-radius: 99px; padding: 0 7px; white-space: nowrap; }
.numbers { border-collapse: collapse; font-size: 13px; width: 100%; line-height: 17px; }
.numbers th, .numbers td { padding: 3px 8px; text-align: right; border: 0; border-bottom: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
.numbers th { font-weight: 650; vertical-align: bottom; } .numbers td:first-child, .numbers th:first-child { text-align: left; }
.numbers td.words, .numbers th.words { text-align: left; }
.stMainBlockContainer [data-testid="stCaptionContainer"] p { font-size: 12.5px; line-height: 17px; }
.stMainBlockContainer [data-testid="stSlider"] label p, .stMainBlockContainer [data-testid="stSelectbox"] label p { font-size: 13px; }
@media (max-width: 1180px) {
  .st-key-figure-body > div > .stHorizontalBlock { flex-direction: column; }
  .st-key-figure-body > div > .stHorizontalBlock > .stColumn { width: 100%; flex: none; }
}
[data-stale="true"], .stElementContainer { opacity: 1 !important; transition: none !important; }
</style>"""

LONGEST_NAME = 17
"""Letters of a neighbouring scene's title that its button has room for."""


def figure_scene(page: StreamlitPage, scene_id: str) -> None:
    """A figure scene of the library. Raises PagewalkError when it cannot be computed."""
    scene = state.figure(scene_id)
    st.html(STYLE)
    _head(page, scene)
    waiting = st.empty()
    with waiting, st.spinner("Computing the figure…"):
        result = state.figure_result(scene_id)
    waiting.empty()
    with st.container(key="figure-body"):
        figure, side = st.columns([0.725, 0.275], gap="medium")
    with figure:
        VIEWS[scene.figure](scene, result, addresses(scene))
    with side:
        st.html(_side(scene, result))


def addresses(scene: FigureScene) -> dict[str, str]:
    """Part of the figure -> the address that shows it, for links to scenes that are there."""
    known = {info.id for info in state.scenes()}
    return {link.about: _address(link) for link in scene.links if link.about and link.scene in known}


def _address(link: FigureLink) -> str:
    if link.scene is None:
        return f"?screen={link.screen}"
    return f"?scene={link.scene}" + (f"&step={link.step}" if link.step is not None else "")


def _head(page: StreamlitPage, scene: FigureScene) -> None:
    words, ways = st.columns([0.62, 0.38])
    words.html(
        f'<div class="figure-head"><h1>{html.escape(scene.title)}</h1><p>{html.escape(scene.goal)} <small>({html.escape(scene.source)})</small></p></div>'
    )
    before, after = neighbours(scene.id)
    with ways, st.container(key="figure-nav", horizontal=True, horizontal_alignment="right"):
        if before:
            st.page_link(page, label=f"← {_short(before)}", icon="", query_params={"scene": before.id}, help=before.title)
        st.page_link(page, label="All scenes", icon="")
        if after:
            st.page_link(page, label=f"{_short(after)} →", icon="", query_params={"scene": after.id}, help=after.title)


def _short(info: SceneInfo) -> str:
    name = info.title.split(":")[0]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1].rstrip(' ,')}…"


def _side(scene: FigureScene, result: FigureResult) -> str:
    """Notes, what one may have read, links, and why values are unconfirmed."""
    tag = '<span class="tag">unconfirmed</span>'
    parts = [f"<li>{html.escape(note.say)}{' ' + tag if note.unconfirmed else ''}</li>" for note in scene.notes]
    text = f"<ol>{''.join(parts)}</ol>" if parts else ""
    for correction in scene.corrections:
        read, really = html.escape(correction.read), html.escape(correction.really)
        text += f'<div class="read"><b>What you may have read</b><p>{read}</p><b>What is right</b><p>{really} <small>({correction.rule})</small></p></div>'
    known: dict[str | None, str] = {None: "The memory screen", **{info.id: info.title for info in state.scenes()}}
    links = [
        f'<li><a href="{_address(link)}" target="_self">{html.escape(known[link.scene])}</a>: {html.escape(link.say)}</li>'
        for link in scene.links
        if link.scene in known
    ]
    if links:
        text += f"<h2>See it live</h2><ul>{''.join(links)}</ul>"
    for reason, names in _reasons(result.unconfirmed.items()).items():
        told = ", ".join(f"{result.values[name]}" for name in names)
        text += f"<p>{tag} <small>{html.escape(told)}: {html.escape(reason)}.</small></p>"
    return f'<div class="figure-side">{text}</div>'


def _reasons(unconfirmed: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in unconfirmed:
        reasons.setdefault(reason, []).append(name)
    return reasons
