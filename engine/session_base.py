"""What every run has, whichever engine it is of: a trace that grows portion by portion, an end, and branches.

An engine's own session (`engine.session.Session`, `engine.paper_session.PaperSession`) says what its operations are.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar

from engine.errors import EngineError, PagewalkError
from engine.session_config import ActionSpec
from engine.trace.events import BeamsChosen, Event, KVWritten, TokenSampled
from engine.trace.frame import Frame, Trace, TraceHeader
from engine.trace.recorder import Recorder

if TYPE_CHECKING:
    from engine.worker.layer_capture import LayerCapture

logger = logging.getLogger(__name__)

NO_MODEL = "none"
"""Model name of a bookkeeping-only run: nothing is computed, so every output token must be forced."""

DEFAULT_MAX_MODEL_LEN = 8192
"""Tokens a sequence may have when nothing says otherwise. The pool and the model's own positions are usually the tighter limits."""

InterpretedLayers: TypeAlias = tuple[int, ...] | Literal["all"] | None

C = TypeVar("C", bound=Any)
R = TypeVar("R", bound=Any)


class SessionBase(ABC, Generic[C, R]):
    """One run of `requests` with settings `config` (a dataclass). Not shared between threads without its own lock: `advance` takes it, `trace.frames` only
    ever grows.

    `actions`: what is done to the engine between its steps. `vocabulary` gives the text of a token id. `backend` and `interpreted_layers` choose the kernels
    (None: the default of this machine). `scenario` is plain data that travels in the trace's header. Raises InvalidInput for an unknown model or backend and
    for whatever the engine could never serve.
    """

    trace: Trace
    _runner_choice: Any
    _recorder: Recorder

    def __init__(
        self,
        config: C,
        requests: tuple[R, ...],
        actions: tuple[ActionSpec, ...] = (),
        *,
        vocabulary: Callable[[int], str],
        model_name: str = NO_MODEL,
        backend: str | None = None,
        interpreted_layers: InterpretedLayers = None,
        scenario: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.error: PagewalkError | None = None
        self._inputs: dict[str, Any] = {
            "requests": requests, "actions": actions, "vocabulary": vocabulary, "model_name": model_name,
            "backend": backend, "interpreted_layers": interpreted_layers, "scenario": scenario,
        }  # fmt: skip
        self._vocabulary = vocabulary
        self._lock = threading.RLock()
        self._finished = False
        self._pins: dict[int, tuple[str, ...]] = {}
        self._prepare(model_name, backend, interpreted_layers)
        self._check(requests, actions, model_name)
        self._ops = self._operations()

    @property
    def complete(self) -> bool:
        """Whether the run came to its own end."""
        return self.trace.complete

    @property
    def finished(self) -> bool:
        """Whether nothing more will be recorded: complete, failed or full."""
        return self._finished

    def advance(self) -> bool:
        """Record one more portion: everything up to the next execution of the model. False when there was nothing left to do.

        The first portion needs no model and is ready at once. An engine error becomes the last frame and `error`; it is not raised.
        """
        with self._lock:
            if self._finished:
                return False
            try:
                next(self._ops)
            except StopIteration:
                self._finished = True
                self.trace.complete = not self._recorder.is_full
            except PagewalkError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("the engine stopped")
                self._fail(EngineError(f"the engine stopped with an internal error ({type(error).__name__}: {error}); this is a bug in Pagewalk"))
            if self._recorder.is_full:
                self._finished = True
            return True

    def run_to_end(self) -> Trace:
        """Record all there is and return the trace."""
        while self.advance():
            pass
        return self.trace

    def run_until(self, predicate: Callable[[Frame], bool]) -> Frame | None:
        """The first frame that fulfils `predicate`, recording only as far as needed; None when the run ends before."""
        seen = 0
        while True:
            for frame in self.trace.frames[seen:]:
                if predicate(frame):
                    return frame
            seen = len(self.trace.frames)
            if not self.advance():
                return None

    def branch(self, seq: int, **changes: Any) -> Self:
        """A fresh session with the same inputs, run until frame `seq` exists. `changes` replace inputs (`requests`, `actions`, ...) or settings
        of `config` by name. Without changes its frames equal this session's."""
        other = self.fresh(**changes)
        other.run_until(lambda frame: frame.seq >= seq)
        return other

    def fresh(self, **changes: Any) -> Self:
        """A session with the same inputs that has recorded nothing yet; `changes` as in `branch`."""
        names = {field.name for field in fields(self.config)}
        settings = {k: v for k, v in changes.items() if k in names}
        inputs = {**self._inputs, **{k: v for k, v in changes.items() if k not in settings}}
        return type(self)(replace(self.config, **settings), **inputs)

    def capture_layer(self, capture: LayerCapture) -> None:
        """Let `capture` keep what its layer is given in every forward pass from now on. Call it before the model first runs; without a model nothing comes."""
        self._runner_choice.layer_capture = capture

    # ------------------------------------------------------------------ for the engines' own sessions

    @abstractmethod
    def _prepare(self, model_name: str, backend: str | None, interpreted_layers: InterpretedLayers) -> None:
        """Set `trace`, `_recorder`, `_runner_choice` (an `engine.runner.RunnerChoice`) and whatever else the engine's operations need."""

    @abstractmethod
    def _check(self, requests: tuple[R, ...], actions: tuple[ActionSpec, ...], model_name: str) -> None:
        """Raise InvalidInput for requests and actions that the engine could never serve, before anything runs."""

    @abstractmethod
    def _operations(self) -> Iterator[None]:
        """The run as a generator that pauses before each execution of the model."""

    def _header(self, choice: Any) -> TraceHeader:
        """Everything that travels with the frames. `choice`: the `engine.runner.RunnerChoice`, which goes on completing what it says of the model."""
        return TraceHeader(
            scenario=dict(self._inputs["scenario"] or {}), config=dict(self.config.described()), model=choice.model, backend=choice.backend,
            versions=choice.versions, seed=self.config.seed, vocabulary={},
        )  # fmt: skip

    def _emit(self, event: Event) -> None:
        """Token texts travel in the header: add those that this event is the first to show, then record it."""
        vocabulary = self.trace.header.vocabulary
        for token_id in self._shown_token_ids(event):
            if token_id not in vocabulary:
                vocabulary[token_id] = self._vocabulary(token_id)
        self._recorder.emit(event)

    @abstractmethod
    def _shown_token_ids(self, event: Event) -> Iterable[int]:
        """Token ids that the event, or the state after it, shows perhaps for the first time."""

    def _fail(self, error: PagewalkError) -> None:
        self.error = error
        self._finished = True
        self._recorder.fail(str(error))


def token_ids_of(event: Event) -> list[int]:
    """The token ids that an event names itself."""
    if isinstance(event, TokenSampled):
        said = event.cause.facts.get("model_token_id")
        return [event.token_id, said] if isinstance(said, int) else [event.token_id]
    if isinstance(event, KVWritten):
        return event.token_ids
    if isinstance(event, BeamsChosen):
        return [candidate.token_id for candidate in event.candidates]
    return []
