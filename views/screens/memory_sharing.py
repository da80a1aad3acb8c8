"""Figure 15 again."""

from __future__ import annotations

import streamlit as st

from engine.paper.simulation_log import Progress
from views.screens.memory_settings import Settings


def sharing_part(settings: Settings, tell: Progress) -> None:
    """To come."""
    st.caption("…")
