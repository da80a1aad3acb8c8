"""The one module that touches Streamlit's session state and caches: which runs are open, and what each browser has been sent.

A scene on a model and a backend is deterministic, so one recording serves everybody who looks at it: it is made once per process and only grows.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import streamlit as st

from engine.errors import InvalidInput, PagewalkError
from engine.models import ModelInfo, attention_layers_of, list_models
from engine.runner import parse_layers
from engine.session_base import NO_MODEL, SessionBase
from engine.trace.closeup import CompiledKernel, KernelCloseup
from engine.trace.events import AttentionComputed
from kernels import BACKENDS
from scenarios import (
    FigureResult,
    FigureScene,
    Scenario,
    SceneInfo,
    for_model,
    list_scenarios,
    list_scenes,
    load_figure,
    load_scenario,
    open_session,
    place_notes,
)
from scenarios.closeup import closeup_at, compiled_at
from scenarios.figures.reading import compute
from views.stage.payload import build_payload

T = TypeVar("T")

MAX_OPEN_RUNS = 64
"""Recordings kept per process; the least recently used goes first and is simply made again when somebody returns to it."""

MAX_FIGURES = 512
"""Computed figures kept per process: a few scenes, each with the choices that people make on its screen."""


_spared: set[str] = set()


def _spare_the_collector(session: SessionBase[Any, Any]) -> None:
    """Move what a model brought with it out of the garbage collector's sight, once per model. Streamlit collects after every run of a script, and
    walking through the objects of torch and transformers, which live as long as the process, would take 0.2 s of every step."""
    fingerprint = session.trace.header.model.get("fingerprint")
    if fingerprint and fingerprint not in _spared:
        _spared.add(fingerprint)
        gc.collect()
        gc.freeze()


@dataclass
class OpenRun:
    """A recording in progress. `advance` is safe to call from the threads of several users: each frame is recorded once."""

    scenario: Scenario
    session: SessionBase[Any, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, have: int) -> None:
        """Make sure that more than `have` frames are recorded, if there are more: records at most one further portion (one engine step)."""
        with self._lock:
            if len(self.session.trace.frames) <= have and not self.session.finished:
                self.session.advance()
                _spare_the_collector(self.session)
                self._place_notes()

    def _place_notes(self) -> None:
        """Notes and corrections travel in the header, by frame. What counts from the end has its place only when the end is known."""
        notes, corrections = self.scenario.notes, self.scenario.corrections
        if not self.session.complete:
            notes = [note for note in notes if note.at.nth > 0 and note.at.kind != "end"]
            corrections = [correction for correction in corrections if correction.at.nth > 0 and correction.at.kind != "end"]
        place_notes(self.scenario.model_copy(update={"notes": notes, "corrections": corrections}), self.session.trace)


class Choice(NamedTuple):
    """What an address chooses: a scene, and model, backend and interpreted layers where it names them."""

    scene: str
    model: str | None = None
    backend: str | None = None
    layers: str | None = None


@st.cache_resource(max_entries=MAX_OPEN_RUNS, show_spinner=False)
def open_run(choice: Choice) -> OpenRun:
    """The recording of a scene of the library, with its first portion, which needs no model. Raises PagewalkError for what cannot be opened."""
    if choice.scene not in {info.id for info in scenes()}:  # a path would be read from the server's disk
        raise InvalidInput(f"there is no scene “{choice.scene}”: the scenes are {', '.join(info.id for info in scenes())}")
    scenario = load_scenario(choice.scene)
    missing = not_installed(scenario.model) if choice.model is None else None
    if missing is not None:
        how = f"run `{missing.how_to_get}` and load this page again"
        raise InvalidInput(f"this scene runs on {missing.name} ({missing.licence}), which is not installed yet: {how}")
    session = open_session(scenario, model=choice.model, backend=choice.backend, interpreted_layers=parse_layers(choice.layers))
    run = OpenRun(for_model(scenario, choice.model), session)
    run.advance(0)
    return run


def open_again_if_failed(choice: Choice) -> OpenRun:
    """The recording of a scene; one that an error stopped is made again, since whatever was in the way may be gone. Raises as `open_run`."""
    if (run := open_run(choice)).session.error is None:
        return run
    open_run.clear(choice)
    return open_run(choice)


class Computed(NamedTuple):
    """A step in which the model ran: the number of its frame with the attention, and the engine step."""

    frame: int
    step: int


def computed_steps(run: OpenRun, frame: int | None, tell: Callable[[int], None]) -> list[Computed]:
    """Where the model ran, as far as the run is recorded: beyond `frame` (None: the first computed one), the step that it belongs to, and the computed step
    after it, if there is any. `tell` gets the number of frames recorded so far. Raises PagewalkError when the run failed before it came to `frame`."""
    session = run.session
    while True:
        frames = session.trace.frames
        found = [Computed(f.seq, f.step) for f in frames if isinstance(f.event, AttentionComputed)]
        here = found[0].step if frame is None and found else frames[frame].step if frame is not None and frame < len(frames) else None
        if session.finished or (here is not None and found and found[-1].step > here):
            break
        tell(len(frames))
        run.advance(len(frames))
    if session.error is not None and (frame or 0) >= len(frames):
        raise session.error
    return found


def closeup(choice: Choice, frame: int, layer: int | None, tile: int | None) -> KernelCloseup:
    """The kernels of the step that `frame` belongs to, made once per process: the run is repeated, which takes seconds. Raises PagewalkError."""

    def make() -> KernelCloseup:
        return closeup_at(open_run(choice).session, frame, layer, tile)

    return remembered(("closeup", choice, frame, layer, tile), make)


def compiled(shown: KernelCloseup) -> list[CompiledKernel]:
    """The kernels of a close-up compiled ahead of time, once per process for each shape of a layer."""

    shape = (shown.num_q_heads, shown.num_kv_heads, shown.head_dim, shown.block_size, shown.sliding_window)
    constants = tuple((launch.kernel, *sorted((name, str(value)) for name, value in launch.constants.items())) for launch in shown.gpu if not launch.attention)
    batch = tuple((row.tokens, row.first_position) for row in shown.table)  # decides the shape of the attention kernel
    return remembered(("compiled", shape, constants, batch), lambda: compiled_at(shown))


def has_closeup(choice: Choice, frame: int, layer: int | None, tile: int | None) -> bool:
    """Whether `closeup` has an answer at once."""
    return is_remembered(("closeup", choice, frame, layer, tile))


def open_chosen(choice: Choice) -> tuple[OpenRun, Choice, str | None]:
    """The recording that an address asks for, what it shows, and no sentence. Where the model, the backend or the layers that the address names cannot be used:
    the scene on its own, and one sentence that says why. Raises PagewalkError when the scene itself cannot be opened."""
    try:
        check_names(choice.model, choice.backend)
        return open_again_if_failed(choice), choice, None
    except PagewalkError as error:
        own = Choice(choice.scene)
        if choice == own:
            raise
        run = open_again_if_failed(own)
        shown = "as it is" if run.scenario.model == NO_MODEL else f"on {run.scenario.model}, its own model"
        return run, own, f"{str(error).rstrip('.')}. The scene is shown {shown}"


@st.cache_resource(show_spinner=False)
def warm_up() -> threading.Thread:
    """Run the first scene in the background, once per process: while somebody looks at the gallery, model and kernels get ready for the stage."""

    def run_first_scene() -> None:
        with contextlib.suppress(PagewalkError):  # opening a scene tells the person who opens it
            open_session(list_scenarios()[0].id).run_to_end()

    thread = threading.Thread(target=run_first_scene, name="warm-up", daemon=True)
    thread.start()
    return thread


@st.cache_data(show_spinner=False)
def scenes() -> list[SceneInfo]:
    """The scenes of the library, in the order of the gallery."""
    return list_scenes()


def figure(scene_id: str) -> FigureScene:
    """A figure scene of the library. Raises PagewalkError for what is none."""
    return load_figure(scene_id)


@st.cache_data(max_entries=MAX_FIGURES, show_spinner=False)
def figure_result(scene_id: str, changes: tuple[tuple[str, Any], ...] = ()) -> FigureResult:
    """What a figure scene computes, once for everybody. `changes`: parameters that a screen let somebody choose, by name. Raises PagewalkError."""
    return compute(load_figure(scene_id), dict(changes))


def models() -> list[ModelInfo]:
    """The models that have a name, installed or not. Asked anew each time: one may be pulled while the app runs."""
    return list_models()


def attention_layers(model: str) -> tuple[int, ...]:
    """The layers of a model that have attention, ascending; none if its files do not say. The others keep a recurrent state, and no kernel of ours runs in
    them."""
    return attention_layers_of(model)


def not_installed(model: str | None) -> ModelInfo | None:
    """The model of this name if it has to be pulled first."""
    return next((info for info in models() if info.name == model and not info.installed), None)


def check_names(model: str | None, backend: str | None) -> None:
    """Raises InvalidInput for a model or a backend that the address names and that does not exist. Paths are for the command line, not for addresses."""
    names = [info.name for info in models()]
    if model is not None and model not in names:
        raise InvalidInput(f"there is no model “{model}”: the models are {', '.join(names)}")
    if (missing := not_installed(model)) is not None:
        raise InvalidInput(f"the model “{missing.name}” is not installed yet: run `{missing.how_to_get}` and load this page again")
    if backend is not None and backend not in BACKENDS:
        raise InvalidInput(f"there is no backend “{backend}”: the backends are {', '.join(BACKENDS)}")


def payload_of(run: OpenRun, trace_id: str, start: int) -> dict[str, Any]:
    """What the browser is sent: the frames from `start` on."""
    return {"trace_id": trace_id, **build_payload(run.session.trace, start=start)}


def answer_need(component_key: str, run: OpenRun, trace_id: str) -> None:
    """The stage asked for more frames: record them and remember how many this browser holds already, so that only new ones are sent."""
    state = st.session_state.get(component_key)
    need = state.get("need") if isinstance(state, Mapping) else None
    if not isinstance(need, Mapping) or need.get("trace_id") != trace_id:
        return
    have = need.get("have")
    held = have if isinstance(have, int) and not isinstance(have, bool) and have >= 0 else 0
    run.advance(held)
    st.session_state[f"held:{trace_id}"] = held


def take_held(trace_id: str) -> int:
    """How many frames the browser said it holds in this very exchange, 0 if it said nothing (then everything is sent)."""
    return int(st.session_state.pop(f"held:{trace_id}", 0))


MAX_RESULTS = 256
"""Computed results kept per process, such as simulations: with every setting that somebody chose, the least recently used goes first."""


@st.cache_resource(show_spinner=False)
def _results() -> OrderedDict[Hashable, object]:
    return OrderedDict()


_results_lock = threading.Lock()


def remembered(key: Hashable, make: Callable[[], T]) -> T:
    """What `make()` gave the first time that somebody asked for `key`, a name and all that the result depends on. A failure is not kept.

    Streamlit's own caches would do, if a function that they keep could move a progress bar.
    """
    results = _results()
    with _results_lock:
        if key in results:
            results.move_to_end(key)
            return cast("T", results[key])
    result = make()
    with _results_lock:
        results[key] = result
        while len(results) > MAX_RESULTS:
            results.popitem(last=False)
    return result


def is_remembered(key: Hashable) -> bool:
    """Whether `remembered` has a result for this key."""
    with _results_lock:
        return key in _results()


def kept(name: str, default: T) -> T:
    """What `keep` put aside in this browser's session under a name."""
    return cast("T", st.session_state.get(name, default))


def keep(name: str, value: object) -> None:
    """Put something aside for this browser's session. A widget's key is such a name, too: until the widget is made in a run, this sets what it shows."""
    st.session_state[name] = value


def forget(name: str) -> None:
    """Take away what `keep` or a widget put aside under a name, if there is anything."""
    st.session_state.pop(name, None)


def clicked(chart: str) -> Any:
    """The `customdata` of the point that was clicked last in the chart `chart` (as `show_chart` calls it); None where none is."""
    selection = st.session_state.get(f"plot-{chart}") or {}
    points = selection.get("selection", {}).get("points", [])
    return points[0].get("customdata") if points else None


def begin(values: Mapping[str, object]) -> None:
    """What widgets show the first time that a browser sees them, by key."""
    for name, value in values.items():
        st.session_state.setdefault(name, value)
