"""Where a token's key and value go: the arithmetic for a token that one clicks, with other block sizes and ranks, and the kernel that does it."""

from __future__ import annotations

import html

import streamlit as st

from engine.trace.closeup import SlotArithmetic
from engine.trace.slot_arithmetic import slot_arithmetic
from views import state
from views.figures.kernel_slot import slot_lines, slot_picture, slot_rows, slot_words
from views.figures.kernel_style import colour_of, plural, span
from views.screens.charts import show_chart
from views.screens.kernels_choice import choose, preset, widget
from views.screens.kernels_look import calculation, escaped
from views.screens.kernels_view import View

MOST_PILLS = 24
RANKS = (1, 2, 4, 8)
WHERE_MINUS_ONE = """**Where −1 comes from.** The slot mapping has a place for every token that a batch may have. Behind the batch's last token the last \
program writes −1; so does every program for a token that another rank keeps, and Pagewalk's also for one behind the end of its row, which vLLM 0.27.0's \
kernel looks up unchecked (vLLM pull request 54296). The KV write kernel stores nothing where it reads −1."""


def slots_part(view: View) -> None:
    """The batch's tokens, and the calculation for one of them."""
    token = _tokens(view)
    row, about = view.row_of(token), view.tokens[token]
    picture, words = st.columns([1.15, 1], gap="medium")
    with words:
        arithmetic, is_run = _pickers(view, token)
        calculation([(line.name, f"= {line.formula}", f"= {line.result}", line.says) for line in slot_lines(arithmetic)])
        _verdict(view, token, arithmetic, is_run)
    with picture:
        figure = slot_picture(arithmetic, row.block_ids, colour_of(view.colours, about.request_id), about.text.strip())
        show_chart(figure, slot_rows(arithmetic), "kernels-slot", alt=slot_words(arithmetic))
        st.markdown(WHERE_MINUS_ONE)
    _programs(view, token)


def _tokens(view: View) -> int:
    """The strip of tokens; returns the place of the chosen one in the batch."""
    tokens = view.tokens
    chosen = view.choices.pick("token", range(len(tokens)))
    first = 0 if len(tokens) <= MOST_PILLS else min(max(0, chosen - MOST_PILLS // 2), len(tokens) - MOST_PILLS)
    shown = range(first, min(len(tokens), first + MOST_PILLS))
    title = f"**The batch**, {plural(len(tokens), 'token')} of {plural(len(view.closeup.table), 'request')}{': click one' if len(tokens) > 1 else ''}."
    if len(shown) == len(tokens):
        st.markdown(title)
    else:
        preset("kernels-token-number", chosen)
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"{title} Shown are places {shown.start} to {shown.stop - 1} of the batch; to another place:", width="content")
            st.number_input("Place in the batch", 0, len(tokens) - 1, key="kernels-token-number", on_change=_numbered, label_visibility="collapsed", width=130)
    with st.container(key="kernels-tokens"):
        st.pills(
            "Token", shown, key=widget("token"), format_func=lambda i: f"**{tokens[i].name}** {escaped(tokens[i].text)}", required=True,
            label_visibility="collapsed",
        )  # fmt: skip
    return chosen


def _numbered() -> None:
    choose("token", state.kept("kernels-token-number", 0))


def _pickers(view: View, token: int) -> tuple[SlotArithmetic, bool]:
    """Sizes to try; returns the calculation, and whether it is the run's own."""
    closeup, choices = view.closeup, view.choices
    divisors = [d for d in range(1, closeup.block_size + 1) if closeup.block_size % d == 0]
    own = _own_kernel_block(view)
    kernel_block = choices.pick("kernel_block", divisors, own)
    ranks = choices.pick("ranks", RANKS)
    rank = choices.pick("rank", range(ranks))
    interleave = choices.pick("interleave", divisors, 1)
    places = st.columns(4, gap="small")
    places[0].selectbox("Kernel block", divisors, key=widget("kernel_block"), help="vLLM's kernels may have smaller blocks than its manager.")
    places[1].selectbox("Ranks", RANKS, key=widget("ranks"), help="Context parallelism: so many GPUs keep one request's keys between them.")
    places[2].selectbox("This rank", range(ranks), key=widget("rank"), disabled=ranks == 1)
    places[3].selectbox("Interleave", divisors, key=widget("interleave"), disabled=ranks == 1, help="So many tokens in turn go to one rank.")
    row, position = view.row_of(token), view.tokens[token].position
    found = slot_arithmetic(
        position, row.block_ids, block_size=closeup.block_size, kernel_block_size=kernel_block, cp_world_size=ranks, cp_rank=rank, cp_interleave=interleave
    )
    return found, (kernel_block, ranks) == (own, 1)


def _own_kernel_block(view: View) -> int:
    """The block size that the run's own slot-mapping kernel had."""
    launch = view.launch("slot_mapping_kernel")
    size = launch.constants.get("KERNEL_BLOCK_SIZE") if launch else None
    return int(size or view.closeup.block_size)


def _verdict(view: View, token: int, arithmetic: SlotArithmetic, is_run: bool) -> None:
    kernels = view.slot_of(token)
    if not is_run:
        st.markdown(
            f":material/calculate: **What if**: worked out by the formula (R8.4) on this run's row, not run. In the run the kernel found slot {kernels}."
        )
    elif kernels == arithmetic.slot:
        st.markdown(f":material/check: **The run's own values.** The slot-mapping kernel wrote slot **{kernels}** for this token: the same.")
    else:
        st.error(f"The slot-mapping kernel wrote slot {kernels} for this token, but the formula gives {arithmetic.slot}.", icon=":material/error:")


def _programs(view: View, token: int) -> None:
    """The grid of the slot-mapping kernel (R8.5)."""
    launch = view.launch("slot_mapping_kernel")
    if launch is None:
        st.caption("In this run the slots were computed without a kernel.")
        return
    last = len(launch.programs_of) - 1
    many = launch.lanes > 1
    why = f"up to {launch.lanes} requests share a program" if many else "one for each request, and one more"
    st.markdown(
        f"**The slot-mapping kernel's grid**: {plural(launch.grid[0], 'program')}, {why}; the last one fills what is left of the slot mapping with −1 (R8.5). "
        f"Slots go by place in the batch: token {token} of the batch has slot_mapping[{token}] = {view.slot_of(token)}."
    )
    items = "".join(
        f"<li{_pad(place == last)}><b>program {place}</b>{html.escape(text)}{_slots_of(view, place) if not many else ''}</li>"
        for place, text in enumerate(launch.programs_of)
    )
    st.html(f'<ol class="programs">{items}</ol>')


def _slots_of(view: View, program: int) -> str:
    if program >= len(view.closeup.table):
        return ""
    slots, runs, start = view.closeup.table[program].slots, [], 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            runs.append(span(slots[start], slots[place - 1] + 1).replace(" to ", "–"))
            start = place
    return f" → {', '.join(runs)}" if len(runs) <= 12 else f" → {len(slots)} slots"


def _pad(last: bool) -> str:
    return ' class="pad"' if last else ""
