"""The gallery: every scene with what it shows and where it comes from."""

from __future__ import annotations

import re

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from views.state import models, not_installed, scenes

GROUP_TITLES = {
    "paper": "The paper's figures",
    "vllm": "vLLM V1 today",
    "limits": "At the limits",
    "bugs": "What can go wrong",
}
COLUMNS = 3
STYLE = """<style>
.stMainBlockContainer { padding: 28px 40px 24px !important; max-width: 1280px !important; margin: 0 auto; }
.stMainBlockContainer h1 { font-size: 30px; padding: 0; }
.stMainBlockContainer h3 { font-size: 17px; padding: 8px 0 10px; }
[class*="st-key-card-"] { gap: 6px; padding: 14px 16px; }
[class*="st-key-card-"] [data-testid="stPageLink-NavLink"] { padding: 0; background: none; }
[class*="st-key-card-"] [data-testid="stPageLink-NavLink"] p { font-size: 16px; font-weight: 650; text-decoration: underline; white-space: normal;
  line-height: 21px; }
[class*="st-key-card-"] [data-testid="stMarkdown"] p { font-size: 14.5px; line-height: 21px; }
.st-key-memory-link [data-testid="stPageLink-NavLink"] { width: fit-content;
  border: 1px solid color-mix(in srgb, currentColor 22%, transparent); border-radius: 8px; }
.st-key-memory-link p { font-weight: 600; }
</style>"""


def gallery(page: StreamlitPage, problem: str | None = None) -> None:
    """All scenes as cards that link to `page`. `problem`: one sentence about an address that leads nowhere."""
    st.html(STYLE)
    st.title("Pagewalk", anchor=False)
    st.markdown("Walk through vLLM's KV cache one decision at a time. A small real language model runs while you watch; step back whenever you like.")
    st.caption("New here? Begin with Figure 6. On the stage, → and ← step, the space bar plays, and a block under the mouse lights up wherever it is drawn.")
    if problem:
        st.error(sentence(problem), icon=":material/error:")
    known, named = scenes(), {model.name for model in models()}
    for group in dict.fromkeys(info.group for info in known):
        st.subheader(GROUP_TITLES.get(group, group.capitalize()), anchor=False)
        members = [info for info in known if info.group == group]
        for first in range(0, len(members), COLUMNS):
            for column, info in zip(st.columns(COLUMNS), members[first : first + COLUMNS], strict=False):
                with column, st.container(border=True, height="stretch", key=f"card-{info.id}"):
                    st.page_link(page, label=_plain(info.title), icon="", query_params={"scene": info.id})
                    st.markdown(_plain(info.goal))
                    source = _plain(info.source)
                    missing = not_installed(info.model)
                    st.caption(source if missing or info.model not in named else f"{source} · model: {info.model}")
                    if missing:
                        st.caption(f"Runs on {missing.name}, which is not installed: `{missing.how_to_get}` ({_plain(missing.licence)})")
        if group == "paper":
            with st.container(key="memory-link"):
                st.page_link(page, label="The memory screen: what paging wins on requests of your choice →", icon="", query_params={"screen": "memory"})
    _models()


def _models() -> None:
    """The models with a name here: what they are, under which licence, and how to get those that are not part of Pagewalk."""
    st.subheader("Models", anchor=False)
    for model in models():
        terms = f", which asks you to accept the [{_plain(model.licence)}]({model.terms_address})" if model.terms_address else f" ({_plain(model.licence)})"
        how = f". Not installed: `{model.how_to_get}`" if not model.installed else ""
        st.caption(f"**{model.name}**{terms}: {_plain(model.description)}{how}")


def sentence(text: str) -> str:
    """A message of the engine as a sentence: a capital letter (but for the name of a field), a full stop, no accidental formatting, and no word so long that it
    can only come from an address."""
    text = re.sub(r"\S{200,}", lambda word: f"{word[0][:60]}…{word[0][-20:]}", text.strip())
    is_field = "_" in text.partition(" ")[0]
    text = _plain(text)
    return (text[:1] if is_field else text[:1].upper()) + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _plain(text: str) -> str:
    """Text as it is: characters that Markdown would take for formatting are escaped."""
    return "".join("\\" + c if c in "\\*_#[]<>$~`:" else c for c in text)
