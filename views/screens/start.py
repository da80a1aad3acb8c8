"""The one entry: the address decides between the gallery and a scene. Whatever is wrong with it is said in one sentence, above the gallery."""

from __future__ import annotations

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from engine.errors import PagewalkError
from views import state
from views.screens.figure_scene import figure_scene
from views.screens.gallery import gallery
from views.screens.kernels import kernels
from views.screens.memory import memory
from views.screens.scene import scene


def start() -> None:
    """Show the scene that the address names (`?scene=…&step=…&model=…&backend=…&layers=…`), the memory screen (`?screen=memory`),
    the kernels of a scene's step (`?screen=kernels&scene=…&step=…`), or the gallery."""
    if st.query_params.get("screen") == "memory":
        memory(page())
        return
    if st.query_params.get("screen") == "kernels":
        kernels(page())
        return
    name = st.query_params.get("scene")
    # A link inside the page changes what the server knows, not what the browser shows: say it again, so that the address can be passed on.
    screen = st.query_params.get("screen")
    st.query_params.from_dict(st.query_params.to_dict() if name or screen else {})
    if not name:
        gallery(page(), f"There is no screen “{screen}”: the address may name memory, kernels, or a scene." if screen else None)
        state.warm_up()
        return
    try:
        if any(info.id == name and info.figure for info in state.scenes()):
            figure_scene(page(), name)
            return
        scene(page(), state.Choice(name, *(st.query_params.get(key) or None for key in state.Choice._fields[1:])))
    except PagewalkError as error:
        gallery(page(), str(error))


def page() -> StreamlitPage:
    """The page that navigation knows and links lead to."""
    return st.Page(start, title="Pagewalk", url_path="", default=True)
