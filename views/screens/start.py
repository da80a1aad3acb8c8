"""The one entry: the address decides between the gallery and a scene. Whatever is wrong with it is said in one sentence, above the gallery."""

from __future__ import annotations

import streamlit as st

from engine.errors import PagewalkError
from views.screens.gallery import gallery
from views.screens.scene import scene


def start() -> None:
    """Show the scene that the address names (`?scene=…&step=…&model=…&backend=…`), or the gallery."""
    name = st.query_params.get("scene")
    if not name:
        gallery()
        return
    try:
        scene(name, st.query_params.get("model") or None, st.query_params.get("backend") or None)
    except PagewalkError as error:
        gallery(str(error))
