"""One scene: small choosers in the corner, the stage over the whole page."""

from __future__ import annotations

from functools import partial

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from engine.session import NO_MODEL
from kernels import BACKENDS
from views import state
from views.screens.gallery import sentence
from views.screens.neighbours import neighbours
from views.stage import make_stage

STAGE = make_stage()
PAGE_STYLE = """<style>
header[data-testid="stHeader"] { display: none; }
.stMainBlockContainer { padding: 0 !important; max-width: none !important; }
.stMainBlockContainer > .stVerticalBlock { gap: 0; }
.st-key-choosers { position: absolute; top: 7px; right: 20px; z-index: 5; width: auto !important; align-items: center; gap: 6px !important; flex-wrap: nowrap; }
.st-key-choosers button, .st-key-choosers a { min-height: 30px !important; height: 30px; padding: 2px 10px !important; background: none !important; }
.st-key-choosers a { border: 1px solid color-mix(in srgb, currentColor 22%, transparent); border-radius: 8px; margin: 0; padding: 2px 7px !important; }
.st-key-choosers p { font-size: 13px !important; font-weight: 500; }
.st-key-problem { padding: 8px 400px 0 20px; }  /* beside the choosers */
[data-stale="true"], .stElementContainer { opacity: 1 !important; transition: none !important; }
</style>"""


def scene(page: StreamlitPage, choice: state.Choice) -> None:
    """A scene of the library; on its own model, with a sentence that says why, when the model, the backend or the layers of the address cannot be used.
    Raises PagewalkError when the scene itself cannot be shown."""
    run, choice, problem = state.open_chosen(choice)
    st.html(PAGE_STYLE)
    if problem:
        for name in state.Choice._fields[1:]:  # what cannot be used goes, so that no link from here carries it on
            st.query_params.pop(name, None)
        with st.container(key="problem"):
            st.error(sentence(problem), icon=":material/error:")
    _choosers(page, choice, choice.model or run.scenario.model)
    _stage(run, "/".join(part or "" for part in choice))


@st.fragment
def _stage(run: state.OpenRun, trace_id: str) -> None:
    """The stage by itself: when it asks for more frames, nothing else on the page runs again."""
    key = f"stage:{trace_id}"
    STAGE(
        key=key,
        data=state.payload_of(run, trace_id, state.take_held(trace_id)),
        on_need_change=partial(state.answer_need, key, run, trace_id),
    )


def _choosers(page: StreamlitPage, choice: state.Choice, model: str) -> None:
    before, after = neighbours(choice.scene)
    with st.container(key="choosers", horizontal=True, gap="small"):
        for arrow, info in (("←", before), (None, None), ("→", after)):
            if arrow is None:
                st.page_link(page, label="All scenes", icon="")
            elif info is not None:
                st.page_link(page, label=arrow, icon="", query_params={"scene": info.id}, help=info.title)
        with st.popover(f"Model: {model}"):
            _scene_chooser(choice.scene)
            if model == NO_MODEL:
                st.caption("This scene runs no model: it shows what the memory manager decides, and its outputs are dictated.")
                return
            _model_chooser(model)
            _backend_chooser(choice.backend)
            if choice.backend in (None, "torch"):
                _layers_chooser(model, choice.layers)


def _scene_chooser(name: str) -> None:
    titles = {info.id: info.title for info in state.scenes()}
    ids = list(titles)
    chosen = st.selectbox("Scene", ids, index=ids.index(name), format_func=lambda i: titles[i])
    if chosen != name:
        _go(scene=chosen)


def _model_chooser(model: str) -> None:
    installed = [info.name for info in state.models() if info.installed]
    names = installed if model in installed else [model, *installed]
    chosen = st.selectbox("Model", names, index=names.index(model))
    if chosen != model:
        _go(model=chosen)
    for info in state.models():
        if not info.installed and info.how_to_get:
            terms = f", which asks you to accept the [{info.licence}]({info.terms_address})" if info.terms_address else ""
            st.caption(f"{info.name}: to install it, run `{info.how_to_get}`{terms}")


def _backend_chooser(backend: str | None) -> None:
    names = ["automatic", *BACKENDS]
    chosen = st.selectbox("Kernels", names, index=names.index(backend) if backend else 0)
    if chosen != (backend or "automatic"):
        _go(backend=None if chosen == "automatic" else chosen)


def _layers_chooser(model: str, layers: str | None) -> None:
    """One layer with attention, or all of them, through the Triton kernel in its interpreter, beside the torch reference."""
    first, *others = state.attention_layers(model) or (0,)
    texts = {"": f"layer {first}", **{str(n): f"layer {n}" for n in others}, "all": "all layers (slow)", "none": "no layer"}
    current = "" if layers in (None, str(first)) else layers
    if current not in texts:
        texts[current] = f"layers {current}"
    chosen = st.selectbox("Through Triton's interpreter", list(texts), index=list(texts).index(current), format_func=texts.__getitem__)
    if chosen != current:
        _go(layers=chosen or None)


def _go(**changes: str | None) -> None:
    """Another address: what is not named stays, the step begins anew. Runs the page again."""
    kept = {key: value for key, value in st.query_params.items() if key in state.Choice._fields}
    wanted = {key: value for key, value in {**kept, **changes}.items() if value}
    st.query_params.from_dict(wanted)
    st.rerun()
