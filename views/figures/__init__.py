"""Pure functions from computed results to Plotly figures. No Streamlit, no engine that runs."""
