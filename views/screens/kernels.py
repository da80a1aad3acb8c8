"""The kernels screen: the Triton kernels of one engine step in one layer, program by program, tile by tile, line by line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.navigation.page import StreamlitPage

from engine.errors import InvalidInput, PagewalkError
from engine.session import NO_MODEL
from engine.trace.closeup import KernelCloseup
from engine.trace.events import AttentionComputed
from engine.trace.frame import Frame, TraceHeader
from views import state
from views.figures.kernel_style import listed, plural
from views.narration.groups import Group, groups_of
from views.screens.gallery import sentence
from views.screens.kernels_attention import attention_part
from views.screens.kernels_choice import PLACE, Choices, choose, go_to, widget
from views.screens.kernels_compare import compare_part
from views.screens.kernels_compiled import compiled_part
from views.screens.kernels_look import STYLE
from views.screens.kernels_slots import slots_part
from views.screens.kernels_source import source_part
from views.screens.kernels_view import View, view_of
from views.state import Choice, Computed

PARTS: dict[str, Callable[[View], None]] = {
    "Attention": attention_part,
    "Slots": slots_part,
    "Reference and Triton": compare_part,
    "Source": source_part,
    "Compiled": compiled_part,
}
GPU, HERE = "gpu", "here"
TILES = {GPU: "As a GPU would run it", HERE: "As it ran here"}
KEYS = (0, 4, 8, 16, 32, 64, 128)
"""Keys per tile that one may ask for; 0: as many as on a GPU."""
SHORT_CONTEXT = 32
"""Keys that one tile of most launches on a GPU holds: 16 to 128, by head size, number type and kind of batch (`kernels.configurations`)."""
EXAMPLES = ("figure-6-v1", "figure-7", "sliding-window-live")
TILES_HELP = (
    "A GPU runs many small programs side by side. Triton's interpreter, which runs the kernels here, takes milliseconds for every program, so the run itself "
    "had few programs with many lanes each. Both are the same source, launched with other constants."
)
KEYS_HELP = (
    "A GPU takes 16 to 128 keys at a time, by head size, number type and kind of batch, often more than a short context has. Smaller tiles, with which a "
    "short context opens, show the loop on few tokens; the result is the same."
)


def kernels(page: StreamlitPage) -> None:
    """The screen at `?screen=kernels&scene=…&step=FRAME`. `page`: where the gallery and the scenes are."""
    st.html(STYLE)
    choices = Choices()
    scene = choices.place.get("scene", "")
    title = next((info.title for info in state.scenes() if info.id == scene), None)
    with st.container(key="kernels-head", horizontal=True, gap="small"):
        heading = st.empty()
        heading.title("Kernels" if title is None else f"Kernels · {title}", anchor=False)
        moves = st.container(horizontal=True, gap="small", width="content")
        if title is not None:
            st.page_link(page, label="Back to the scene", icon="", query_params={name: choices.place[name] for name in PLACE if name in choices.place})
        st.page_link(page, label="All scenes", icon="")
    with st.container(key="kernels-controls", horizontal=True, gap="small"):
        controls = st.container(horizontal=True, gap="small", width="content", vertical_alignment="center")
        with st.container(key="kernels-status"):
            status = st.empty()
    try:
        choice = _choice(choices, title)
        frame, steps = _step(choice, choices, status)
    except PagewalkError as error:
        status.error(sentence(str(error)), icon=":material/error:")
        _way_on(page)
        return
    choices.frame = frame.seq
    with moves:
        _moves(steps, frame)
    heading.title(f"Kernels of engine step {frame.step} · {title}", anchor=False)
    computed = _computed_at(steps, frame)
    if computed is None:
        _nothing_computed(status, steps, frame)
        choices.to_address()
        return
    run = state.open_run(choice)
    at = run.session.trace.frames[computed.frame]
    assert isinstance(at.event, AttentionComputed)
    about = _described(at.event)
    status.markdown(about)
    made = _closeup(choice, computed, choices, controls, status, at.event)
    if made is None:
        choices.to_address()
        return
    closeup, as_gpu = made
    view = view_of(closeup, at, run.session.trace.header.vocabulary, as_gpu, choices, at.event.agrees_within, at.event.layers)
    _parts(view, closeup)
    choices.to_address()
    if choices.problem:
        status.error(sentence(choices.problem), icon=":material/error:")
    else:
        status.markdown(about)


def _choice(choices: Choices, title: str | None) -> Choice:
    """The run that the address names. Raises PagewalkError for one that cannot be."""
    scene = choices.place.get("scene", "")
    if title is None or scene in {info.id for info in state.scenes() if info.figure}:
        what = f"no engine runs in the scene “{scene}”" if title else f"there is no scene “{scene}”" if scene else "the address names no scene"
        raise InvalidInput(f"{what}: open this screen from a scene in which a model runs, such as one of these")
    choice = Choice(scene, *(choices.place.get(name) for name in Choice._fields[1:]))
    state.check_names(choice.model, choice.backend)
    return choice


def _step(choice: Choice, choices: Choices, status: DeltaGenerator) -> tuple[Frame, list[Computed]]:
    """The frame that the address names (none: the first in which the model ran) and all computed steps so far. Raises PagewalkError."""
    text = choices.place.get("step", "")
    wanted = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
    if text and wanted is None:
        choices.problem = f"the address says step={text}, but step is the number of a frame of the run"
    run = state.open_again_if_failed(choice)
    if run.session.trace.header.model["name"] == NO_MODEL:
        raise InvalidInput("no model runs in this scene, it keeps the books only, so no kernel runs: choose a scene with a model, such as one of these")
    shown = False

    def tell(frames: int) -> None:
        nonlocal shown
        if frames > 1 or shown:
            status.progress(0.0 if not wanted else min(frames / (wanted + 1), 1.0), f"Running the scene: {plural(frames, 'frame')} …")
        shown = True

    steps = state.computed_steps(run, wanted, tell)
    frames = run.session.trace.frames
    if wanted is not None and wanted >= len(frames):
        choices.problem = f"the address says step={wanted}, but the last frame of this run is {len(frames) - 1}"
        wanted = None
    if not steps:
        raise run.session.error or InvalidInput("nothing is computed in this scene, so no kernel runs: choose another, such as one of these")
    if wanted is None:
        wanted = steps[0].frame
    return frames[wanted], steps


def _computed_at(steps: list[Computed], frame: Frame) -> Computed | None:
    """The computed step that the frame belongs to: the model's next run in this engine step, or its last one."""
    same = [computed for computed in steps if computed.step == frame.step]
    return next((computed for computed in same if computed.frame >= frame.seq), same[-1] if same else None)


def _way_on(page: StreamlitPage) -> None:
    """Links to scenes in which there is something to see."""
    titles = {info.id: info.title for info in state.scenes()}
    with st.container(horizontal=True, gap="small"):
        for scene in EXAMPLES:
            if scene in titles:
                st.page_link(page, label=titles[scene], icon="", query_params={"screen": "kernels", "scene": scene})


def _moves(steps: list[Computed], frame: Frame) -> None:
    """To the computed steps before and after."""
    before = [computed for computed in steps if computed.step < frame.step]
    after = [computed for computed in steps if computed.step > frame.step]
    for name, found in (("before", before[-1:]), ("after", after[:1])):
        label = f"← step {found[0].step}" if found and name == "before" else f"step {found[0].step} →" if found else "←" if name == "before" else "→"
        st.button(
            label, key=f"kernels-{name}", disabled=not found, on_click=go_to, args=(found[0].frame if found else 0,),
            help="The step before in which the model ran" if name == "before" else "The next step in which the model runs",
        )  # fmt: skip


def _nothing_computed(status: DeltaGenerator, steps: list[Computed], frame: Frame) -> None:
    """A sentence, and the way on."""
    nearest = [*[s for s in steps if s.step < frame.step][-1:], *[s for s in steps if s.step > frame.step][:1]]
    with status.container(horizontal=True, gap="small"):
        st.info(f"The model did not run in step {frame.step}, so no kernel did.", icon=":material/info:")
        for computed in nearest:
            st.button(f"Look at step {computed.step}", key=f"kernels-near-{computed.step}", on_click=go_to, args=(computed.frame,))


def _described(event: AttentionComputed) -> str:
    """What runs in this step."""
    parts = []
    for request_id, queries, keys in zip(event.request_ids, event.query_lens, event.seq_lens, strict=True):
        parts.append(f"**{request_id}**: {plural(queries, 'query')} on {plural(keys, 'key')}".replace("querys", "queries"))
    return f"One batch: {listed(parts, 5)}."


def _closeup(
    choice: Choice, computed: Computed, choices: Choices, controls: DeltaGenerator, status: DeltaGenerator, event: AttentionComputed
) -> tuple[KernelCloseup, bool] | None:
    """The controls and the close-up that they ask for; None where there is none: then `status` says why."""
    header = state.open_run(choice).session.trace.header
    num_layers = int(header.model.get("num_layers") or 1)
    layer = choices.pick("layer", range(num_layers), event.layers[0] if event.layers else 0)
    tiles = choices.pick("tiles", list(TILES))
    keys = choices.pick("keys", KEYS, first_look(header, event))
    with controls:
        names = _layer_names(header)
        wide = 104 if not names else 212
        st.selectbox(
            "Layer", range(num_layers), key=widget("layer"), format_func=lambda n: f"Layer {n}{names.get(n, '')}", label_visibility="collapsed", width=wide
        )
        st.segmented_control(
            "Tiles", list(TILES), key=widget("tiles"), format_func=TILES.__getitem__, required=True, label_visibility="collapsed", help=TILES_HELP
        )
        st.selectbox(
            "Keys per tile", KEYS, key=widget("keys"), label_visibility="collapsed", width=176, disabled=tiles == HERE, help=KEYS_HELP,
            format_func=lambda n: f"tiles of {n} keys" if n else "a GPU's tiles",
        )  # fmt: skip
    if layer in _state_layers(header):
        where = "The scene shows the block from which its state is read and the one to which it is written."
        st.info(f"Layer {layer} keeps one state for each request and has no attention, so these kernels do not run in it. {where}", icon=":material/info:")
        st.button("Show the first layer with attention", key="kernels-any-layer", on_click=_any_layer, args=(choice, computed.frame))
        return None
    try:
        with _telling(status, not state.has_closeup(choice, computed.frame, layer, keys or None)):
            return state.closeup(choice, computed.frame, layer, keys or None), tiles == GPU
    except PagewalkError as error:
        status.error(sentence(str(error)), icon=":material/error:")
        if not choices.is_default("layer"):
            st.button("Show the first layer with attention", key="kernels-any-layer", on_click=_any_layer, args=(choice, computed.frame))
        return None


def first_look(header: TraceHeader, event: AttentionComputed) -> int:
    """Keys per tile until somebody chooses: as on a GPU (0), but about a block for a short context, because a loop that runs once shows nothing of a walk."""
    is_short = max(event.seq_lens, default=0) <= SHORT_CONTEXT
    return next((keys for keys in KEYS[1:] if keys >= header.config["block_size"]), 0) if is_short else 0


def _any_layer(choice: Choice, frame: int) -> None:
    """To the first layer with attention. What is wrong otherwise is said when the page runs again."""
    with contextlib.suppress(PagewalkError):
        choose("layer", state.closeup(choice, frame, None, None).layer)


def _layer_groups(header: TraceHeader) -> dict[int, Group]:
    """The KV-cache group of each layer, where the run has several groups."""
    groups = groups_of(header)
    if len(groups) == 1:
        return {}
    named = [described.get("layer_names", []) for described in header.config.get("kv_cache_groups") or []]
    return {int(name.rpartition(".")[2]): group for group, names in zip(groups, named, strict=False) for name in names if name[-1:].isdigit()}


def _layer_names(header: TraceHeader) -> dict[int, str]:
    """What to say of a layer behind its number, where the run has several KV-cache groups."""
    return {layer: f" · {group.label}" for layer, group in _layer_groups(header).items()}


def _state_layers(header: TraceHeader) -> set[int]:
    """Layers that keep a recurrent state, where the run has several KV-cache groups."""
    return {layer for layer, group in _layer_groups(header).items() if group.is_state}


@contextlib.contextmanager
def _telling(status: DeltaGenerator, slow: bool) -> Iterator[None]:
    """Say for how long something has been computed, if it will take a while."""
    if not slow:
        yield
        return
    with status.container(), st.spinner("Running the scene again up to this step, and its kernels line by line …", show_time=True):
        yield


def _parts(view: View, closeup: KernelCloseup) -> None:
    part = view.choices.pick("part", list(PARTS))
    tabs = st.tabs(list(PARTS), key=widget("part"), on_change="rerun")
    with tabs[list(PARTS).index(part)]:
        try:
            PARTS[part](view)
        except PagewalkError as error:
            view.choices.problem = view.choices.problem or str(error)
