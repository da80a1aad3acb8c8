"""The Triton source of the kernels that ran, with how often each line did."""

from __future__ import annotations

import html

import streamlit as st

from engine.trace.closeup import KernelSource, LaunchCloseup
from views.figures.kernel_style import plural
from views.screens.kernels_choice import widget
from views.screens.kernels_view import NAMES, View

HEIGHT = 500


def source_part(view: View) -> None:
    """The listing on the left, the constants of the launch on the right."""
    sources = {source.kernel: source for source in view.closeup.sources}
    launches = {launch.kernel: launch for launch in view.launches if launch.kernel in sources}
    if not launches:
        st.info("No Triton kernel ran here, so there is no source to walk through.")
        return
    default = "paged_attention_kernel" if "paged_attention_kernel" in launches else next(iter(launches))
    kernel = view.choices.pick("kernel", list(launches), default)
    listing, words = st.columns([2.6, 1], gap="medium")
    with words:
        st.segmented_control(
            "Kernel", list(launches), key=widget("kernel"), required=True, label_visibility="collapsed", format_func=lambda k: NAMES.get(k, k)
        )  # fmt: skip
        _about(launches[kernel], sources[kernel])
    with listing, st.container(height=HEIGHT, border=True, key="kernels-listing"):
        st.html(listing_html(sources[kernel], launches[kernel]))


def _about(launch: LaunchCloseup, source: KernelSource) -> None:
    shape = " × ".join(map(str, launch.grid))
    ran = sum(count > 0 for count in launch.lines.values())
    never = sum(count == 0 for count in launch.lines.values())
    st.markdown(
        f"`{source.file}`, line {source.first_line}. {shape} program{'' if shape == '1' else 's'}, {plural(launch.lanes, 'lane')} each. In all of them "
        f"together **{plural(ran, 'line')} ran** (amber, with ▸ and a count) and {plural(never, 'line')} did not (pale, ×)."
    )
    st.markdown("**Constants of this launch.** The compiler knows them: a branch that they rule out is not in the program at all.")
    told = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    values = {**launch.constants, **{name: value for name, value in told.items() if value is not None}}
    items = "".join(f"<li>{html.escape(name)} = {html.escape(str(value))}</li>" for name, value in values.items())
    st.html(f'<ol class="programs constants">{items}</ol>')
    if any(launch.constants.get(name) for name in ("PROGRESS", "WITNESS")):
        st.caption("PROGRESS and WITNESS are on only while the kernel is watched; without them their branches are not there.")


def listing_html(source: KernelSource, launch: LaunchCloseup) -> str:
    """The source as HTML, a line each: its number, how often it ran, its text. Lines that are no statements have no mark; the arguments are folded away."""
    body = next((place for place in range(len(source.lines)) if source.first_line + place in launch.lines), 0)
    lines = []
    for place, text in enumerate(source.lines):
        count = launch.lines.get(source.first_line + place)
        kind, mark = ("", "") if count is None else (' class="ran"', f"▸ {count:,}×") if count else (' class="skipped"', "×")
        lines.append(f"<div{kind}><i>{source.first_line + place}</i><b>{mark}</b><span>{html.escape(text) or ' '}</span></div>")
    said = f"<summary>Lines {source.first_line} to {source.first_line + body - 1}: name and arguments</summary>"
    head = f"<details>{said}{''.join(lines[:body])}</details>" if body else ""
    return f'<div class="listing">{head}{"".join(lines[body:])}</div>'
