"""Pagewalk: page configuration and navigation, nothing else. Start it with ``streamlit run app.py``."""

from __future__ import annotations

import streamlit as st

from views.screens.start import page

st.set_page_config(page_title="Pagewalk", page_icon="▦", layout="wide", initial_sidebar_state="collapsed")
st.navigation([page()], position="hidden").run()
