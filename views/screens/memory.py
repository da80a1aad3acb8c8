"""The memory screen: what the slots of a KV cache hold under the three reservations of before and under paging, on requests of one's choice."""

from __future__ import annotations

import re
from collections.abc import Callable

import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.navigation.page import StreamlitPage

from engine.errors import InvalidInput, PagewalkError
from engine.paper.memory_model import GIB, OPT_13B, PAPER_NUM_SLOTS, TABLE_1_KV_CACHE_BYTES
from engine.paper.simulation_log import Progress
from scenarios.workloads import workload_names
from views import state
from views.screens.gallery import sentence
from views.screens.memory_batch import batch_part
from views.screens.memory_block_size import block_size_part
from views.screens.memory_settings import (
    BLOCK_SIZES,
    FILE,
    LONGEST,
    MAX_SLOTS,
    MIN_SLOTS,
    REQUESTS,
    Settings,
    Upload,
    from_address,
    read_upload,
    requests_of,
    to_address,
)
from views.screens.memory_sharing import sharing_part
from views.screens.memory_slots import slots_part
from views.screens.memory_waste import waste_part

Part = Callable[[Settings, Progress], None]
PARTS: dict[str, Part] = {
    "Waste": waste_part,
    "Slots": slots_part,
    "Requests at once": batch_part,
    "Block size": block_size_part,
    "Sharing": sharing_part,
}
TITLES = {
    "sharegpt-like": "Lengths like ShareGPT",
    "alpaca-like": "Lengths like Alpaca",
    "azure-conversation": "Azure conversations 2023",
    "azure-code": "Azure code completion 2023",
    "mooncake-conversation": "Mooncake conversations",
    "mooncake-synthetic": "Mooncake synthetic",
}
STYLE = """<style>
header[data-testid="stHeader"] { display: none; }
.stMainBlockContainer { padding: 10px 28px 16px !important; max-width: 1440px !important; margin: 0 auto; }
.stMainBlockContainer > .stVerticalBlock { gap: 6px; }
.stMainBlockContainer h1 { font-size: 21px; padding: 0; }
.stMainBlockContainer h4 { font-size: 15px; padding: 0 0 2px; }
.st-key-memory-head { align-items: center; }
.st-key-memory-head a { border: 1px solid color-mix(in srgb, currentColor 22%, transparent); border-radius: 8px; margin: 0;
  min-height: 30px; padding: 2px 10px; }
.st-key-memory-controls label p, .st-key-memory-controls [data-testid="stPopover"] p { font-size: 13px; }
.st-key-memory-controls [data-testid="stPopover"] { margin-top: 27px; }
.st-key-memory-status { height: 60px; min-height: 60px; flex: none !important; overflow: hidden auto; gap: 0; }
.st-key-memory-status [data-testid="stCaptionContainer"] p { font-size: 13px; line-height: 18px; margin: 0; }
.st-key-memory-status [data-testid="stAlertContainer"] { padding: 8px 12px; min-height: 0; }
.stMainBlockContainer [data-testid="stTabs"] [role="tabpanel"] { padding-top: 8px; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] :is(p, li, td, th) { font-size: 13.5px; line-height: 18.5px; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] ul { padding-left: 16px; margin: 0; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] :is(td, th) { padding: 3px 8px; }
[data-testid="stTabs"] [data-testid="stCaptionContainer"] p { font-size: 13px; line-height: 18px; }
[data-testid="stTabs"] [data-testid="stMarkdownContainer"] li { margin: 0 0 3px; padding: 0; }
[data-stale="true"], .stElementContainer { opacity: 1 !important; transition: none !important; }
@media (max-width: 1150px) { .st-key-memory-status { height: 78px; min-height: 78px; } }
</style>"""


def memory(page: StreamlitPage) -> None:
    """The screen at `?screen=memory`. `page`: where the gallery is."""
    st.html(STYLE)
    wanted, problem = from_address()
    with st.container(key="memory-head", horizontal=True, horizontal_alignment="distribute"):
        st.title("Where the memory goes, and what paging wins", anchor=False)
        st.page_link(page, label="All scenes", icon="")
    controls = st.container(key="memory-controls")
    with st.container(key="memory-status"):
        status = st.empty()
    with controls:
        places = st.columns([2.5, 1.25, 1.35, 1.35, 1, 1.2], gap="small")
        settings, bad_file = _choose(places, wanted, status)
    message = bad_file or problem
    about = _described(settings)
    status.caption(about)
    tell = _teller(status)
    part = st.query_params.get("part", "")
    state.begin({"memory-part": part if part in PARTS else next(iter(PARTS))})
    tabs = st.tabs(list(PARTS), key="memory-part", on_change="rerun")
    shown = next((name for name, tab in zip(PARTS, tabs, strict=True) if tab.open), next(iter(PARTS)))
    to_address(settings, shown, next(iter(PARTS)))
    with tabs[list(PARTS).index(shown)]:
        try:
            PARTS[shown](settings, tell)
        except PagewalkError as error:
            message = message or str(error)
    with status.container():
        if message:
            st.error(sentence(message), icon=":material/error:")
        else:
            st.caption(about)


def _choose(places: list[DeltaGenerator], wanted: Settings, status: DeltaGenerator) -> tuple[Settings, str | None]:
    """The row of controls; and one sentence about an uploaded file that cannot be read: then everything stays as it is."""
    with places[1], st.popover("Your own file", width="stretch"):
        bad_file = _upload(status)
    upload: Upload | None = state.kept("memory:upload", None)
    names = [*workload_names(), *([FILE] if upload else [])]
    titles = {**TITLES, FILE: upload.workload.name if upload else ""}
    state.begin({
        "memory-workload": wanted.workload, "memory-slots": wanted.num_slots, "memory-longest": wanted.longest, "memory-block": wanted.block_size,
        "memory-requests": wanted.num_requests,
    })  # fmt: skip
    with places[0]:
        workload = st.selectbox(
            "Requests", names, key="memory-workload", format_func=lambda name: titles.get(name, name), on_change=state.keep, args=("memory:problem", None)
        )
    with places[2]:
        num_slots = st.number_input("Memory (slots)", MIN_SLOTS, MAX_SLOTS, step=1024, key="memory-slots", help=SLOTS_HELP)
    with places[3]:
        longest = st.selectbox("Longest sequence", LONGEST, key="memory-longest", format_func=lambda n: f"{n:,}", help=LONGEST_HELP)
    with places[4]:
        block_size = st.selectbox("Block size", BLOCK_SIZES, key="memory-block")
    with places[5]:
        num_requests = st.selectbox("Requests used", REQUESTS, key="memory-requests", format_func=lambda n: f"{n:,}")
    return Settings(workload, int(num_slots), longest, block_size, num_requests), bad_file


SLOTS_HELP = (
    f"A slot holds keys and values of one token. {PAPER_NUM_SLOTS:,} are what the paper's OPT-13B leaves on a card of 40 GB: "
    f"{TABLE_1_KV_CACHE_BYTES['OPT-13B'] // GIB} GiB at {OPT_13B.kv_bytes_per_token:,} bytes a token."
)
LONGEST_HELP = "Tokens of the longest sequence that the model takes, prompt and output together. Orca (Max) reserves this much for every request."


def _upload(status: DeltaGenerator) -> str | None:
    """The place for a file. Returns one sentence if the file that lies there cannot be read."""
    st.markdown(
        "A CSV file with a header line, or one JSON object per line. Names of the columns: `prompt_len` and `output_len`; or as in the Azure traces, "
        "`ContextTokens` and `GeneratedTokens`; or as in the Mooncake traces, `input_length` and `output_length`. The file stays in this server's memory."
    )
    file = st.file_uploader("Your own requests", type=["csv", "jsonl", "json", "txt"], key="memory-file", label_visibility="collapsed")
    if file is None:
        return None
    if state.kept("memory:file", None) != file.file_id:
        state.keep("memory:file", file.file_id)
        bar = status.progress(0.0, f"Reading {file.name}")
        try:
            state.keep("memory:upload", read_upload(file.getvalue(), file.name, lambda share: bar.progress(share, f"Reading {file.name}")))
            state.keep("memory:problem", None)
            state.keep("memory-workload", FILE)
        except InvalidInput as error:
            state.keep("memory:problem", _with_quoted_name(str(error), file.name))
    problem: str | None = state.kept("memory:problem", None)
    if problem:
        st.error(sentence(problem), icon=":material/error:")
    return problem


def _with_quoted_name(message: str, name: str) -> str:
    """The reader's message about a file, its name in quotes, as it is written: "a.csv:3: …" becomes “a.csv”, line 3: …"""
    place, said = re.fullmatch(r"(?::(\d+))?: (.*)", message.removeprefix(name), re.DOTALL).groups()  # type: ignore[union-attr]
    return f"“{name}”, line {place}: {said}" if place else f"“{name}”: {said}"


def _teller(status: DeltaGenerator) -> Progress:
    """Moves a bar in the place of the description."""

    def tell(share: float) -> None:
        status.progress(min(max(share, 0.0), 1.0), "Computing …")

    return tell


def _described(settings: Settings) -> str:
    """Which requests these are, from where, what of it is ours, and how many of them the model cannot take."""
    _, workload = requests_of(settings)
    parts = [
        f"{len(workload.requests):,} requests, all there from the start: on average {workload.mean_prompt_len:,.1f} prompt and "
        f"{workload.mean_output_len:,.1f} output tokens.",
        f"Source: {workload.source}.",
        workload.note,
    ]
    too_long = sum(r.prompt_len + r.output_len > settings.longest for r in workload.requests)
    if too_long:
        parts.insert(
            0,
            f"Left out are {too_long:,} requests, because they are longer than {settings.longest:,} tokens: raise this limit, and the memory with it.",
        )
    return sentence(" ".join(part for part in parts if part))
