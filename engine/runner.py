"""Chooses what executes the model's part of a step, and describes the choice for the trace's header.

Choosing is cheap and loads no torch; `make` does. That is why a screen can show the first frames of a run while the weights still load.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from engine.bookkeeping import BookkeepingRunner, ContextParallelism
from engine.core.kv_cache_spec import FullAttentionSpec, MambaSpec
from engine.errors import EngineError, InvalidInput
from engine.libraries import load_libraries
from engine.model_groups import layer_groups_of
from engine.paper.config import PaperConfig
from engine.paper.step import IterationRunner
from engine.paper_bookkeeping import PaperBookkeepingRunner
from engine.session_base import DEFAULT_MAX_MODEL_LEN, NO_MODEL, InterpretedLayers
from engine.session_config import SessionConfig
from engine.trace.events import Emit
from engine.trace.witness import is_wanted
from kernels import BACKEND_VARIABLE, BACKENDS, UnknownBackend, choose_backend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.session import Runner
    from engine.worker.kernel_settings import KernelSettings
    from engine.worker.layer_capture import LayerCapture


def parse_layers(text: str | None) -> InterpretedLayers:
    """Layers to interpret as people write them: ``3``, ``0,2``, ``all``, ``none``; None or nothing is the default. Raises InvalidInput."""
    wanted = (text or "").strip().lower()
    if wanted in ("", "default"):
        return None
    if wanted == "all":
        return "all"
    if wanted == "none":
        return ()
    parts = [part.strip() for part in wanted.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise InvalidInput(f"“{text}” names no layers: write a number like 0, several like 0,2, or all, or none")
    return tuple(sorted({int(part) for part in parts}))


C = TypeVar("C", SessionConfig, PaperConfig)


class _Loaded(NamedTuple):
    """A model that is ready to run. `max_model_len`: longest sequence, in tokens."""

    model: PreTrainedModel
    device: str
    settings: KernelSettings
    max_model_len: int


class RunnerChoice(Generic[C]):
    """One model, one backend, not loaded yet.

    `model` and `backend` are plain data for the header; `make` completes them with what is only known once the weights are there.
    `layer_capture` goes to the runner that `make` builds on a model. Raises InvalidInput for an unknown model or backend, and for groups that a real model does
    not have.
    """

    def __init__(self, config: C, model_name: str, backend: str | None, interpreted_layers: InterpretedLayers) -> None:
        if backend is not None and backend not in BACKENDS:
            raise InvalidInput(f"there is no backend “{backend}”: choose one of {', '.join(BACKENDS)}, or none for this machine's default")
        self._config: C = config
        self._requested = backend
        self._interpreted_layers = interpreted_layers
        self._bookkeeping = model_name == NO_MODEL
        self.model: dict[str, Any] = {"name": model_name}
        self.backend: dict[str, Any] = {"requested": backend}
        self.versions = {"python": ".".join(map(str, sys.version_info[:3]))}
        self.vocab_size: int | None = None
        self.layer_capture: LayerCapture | None = None
        if self._bookkeeping:
            self.backend.update(name="none", reason="bookkeeping only: no model runs")
            return
        self._check_config(config)
        wish = backend or os.environ.get(BACKEND_VARIABLE, "").strip()
        if wish:
            try:
                choose_backend(backend, "cuda" if wish == "triton" else "cpu")
            except UnknownBackend as error:
                raise InvalidInput(str(error)) from error
        from engine.models import attention_layers_of, load_tokenizer, num_layers_of

        num_layers = num_layers_of(model_name)
        for layer in interpreted_layers if isinstance(interpreted_layers, tuple) else ():
            if num_layers is not None and not 0 <= layer < num_layers:
                raise InvalidInput(f"there is no layer {layer} to interpret: the {num_layers} layers of {model_name} are 0 to {num_layers - 1}")
            having = attention_layers_of(model_name)
            if having and layer not in having:
                raise InvalidInput(
                    f"layer {layer} of {model_name} keeps a recurrent state and runs no attention kernel to interpret; "
                    f"its attention layers are {', '.join(map(str, having))}"
                )
        self.vocab_size = load_tokenizer(model_name).vocab_size
        for package in ("torch", "transformers", "triton"):
            try:
                self.versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue

    def _check_config(self, config: C) -> None:
        """Raises InvalidInput for settings that no real model can run with."""

    def check_token_ids(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidInput when a token id is outside the model's vocabulary."""
        if self.vocab_size is None:
            return
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidInput(
                    f"request {request_id}: token {position} of the prompt is {token_id}, but the vocabulary of {self.model['name']} goes from 0 to "
                    f"{self.vocab_size - 1}"
                )

    def _load(self, capacity: int, max_model_len: int | None) -> _Loaded:
        """The model on its device, and how its kernels run. `capacity`: tokens that the pool holds, `max_model_len`: as the settings have it. Mutates `model`
        and `backend`. Raises as `make`."""
        import torch

        from engine.models import load_model
        from engine.worker.attention import attention_layers_of
        from engine.worker.device import choose_device, model_on
        from engine.worker.kernel_settings import choose_kernel_settings

        # One thread: on a shared machine several are up to three times slower, and sums in another order would change the trace's last digits.
        torch.set_num_threads(1)
        loaded = load_model(self.model["name"])
        self.model.update(fingerprint=loaded.fingerprint, **loaded.shape)
        device = choose_device(self._requested)
        settings = choose_kernel_settings(
            self._requested,
            self._interpreted_layers,
            num_layers=loaded.shape["num_layers"],
            device=device,
            attention_layers=attention_layers_of(loaded.model),
        )
        self.backend.update(name=settings.backend.name, reason=settings.backend.reason, interpreted_layers=list(settings.interpreted_layers))
        if max_model_len is not None and max_model_len > loaded.max_model_len:
            raise EngineError(f"max_model_len is {max_model_len}, but {loaded.name} has {loaded.max_model_len} positions; give a smaller one")
        return _Loaded(model_on(loaded.model, device), device, settings, max_model_len or min(capacity, loaded.max_model_len))


class V1RunnerChoice(RunnerChoice[SessionConfig]):
    """For vLLM V1's engine: `engine.worker.model_runner.ModelRunner` or `engine.bookkeeping.BookkeepingRunner`."""

    def _check_config(self, config: SessionConfig) -> None:
        if not config.plain_full_attention or (config.kv_cache_groups and config.model_groups):
            raise InvalidInput(
                f"the KV-cache groups of {self.model['name']} come from its layers; leave kv_cache_groups and ranks out, or set the model to “{NO_MODEL}”"
            )
        if config.model_groups:
            from engine.models import sliding_window_of

            self.model["sliding_window"] = sliding_window_of(self.model["name"])

    def make(self, emit: Emit) -> Runner:
        """Load the model (once per process) and build its runner. Mutates `model` and `backend`: the facts known only now are added.

        Raises EngineError when the model cannot hold what the settings allow, PagewalkError of `engine.models` when it cannot be loaded.
        """
        if self._bookkeeping:
            return self._bookkeeping_runner(emit)
        load_libraries()
        from engine.worker.model_runner import ModelRunner

        config = self._config
        groups = config.group_specs()
        specs = [group.kv_cache_spec for group in groups]
        # Groups of windows or states alone let go of old blocks, so that the pool does not bound a request's length.
        full = next((spec for spec in specs if isinstance(spec, FullAttentionSpec)), None)
        loaded = self._load((config.num_blocks - 1) * full.block_size if full is not None else DEFAULT_MAX_MODEL_LEN, config.max_model_len)
        runner = ModelRunner(
            loaded.model,
            num_blocks=config.num_blocks,
            block_sizes=tuple(spec.block_size for spec in specs),
            max_num_seqs=config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kernel_settings=loaded.settings,
            emit=emit,
            device=loaded.device,
            layer_groups=layer_groups_of(groups) if config.model_groups else None,
            sliding_windows=[spec.event_sliding_window for spec in specs],
            attention_shares=config.attention_shares,
            kernel_witness=is_wanted(config.kernel_witness, config.num_blocks),
            mamba_cache_modes=[spec.mamba_cache_mode if isinstance(spec, MambaSpec) else None for spec in specs],
        )
        runner.layer_capture = self.layer_capture
        if not config.clear_rows:
            runner.block_table.leave_rows_as_they_are()
        return runner

    def _bookkeeping_runner(self, emit: Emit) -> BookkeepingRunner:
        config = self._config
        parallelism = ContextParallelism(config.decode_context_parallel_size, config.dcp_rank, config.cp_kv_cache_interleave_size)
        return BookkeepingRunner([group.kv_cache_spec for group in config.group_specs()], emit, parallelism, clears_rows=config.clear_rows)


class PaperRunnerChoice(RunnerChoice[PaperConfig]):
    """For the paper's engine: `engine.worker.sequence_runner.SequenceRunner` or `engine.paper_bookkeeping.PaperBookkeepingRunner`."""

    def _check_config(self, config: PaperConfig) -> None:
        from engine.models import has_mamba_layers

        name = self.model["name"]
        if has_mamba_layers(name):
            raise InvalidInput(f"{name} has layers with a recurrent state, which the paper's engine does not know; take tiny, or a scene of vLLM V1")

    def make(self, emit: Emit) -> IterationRunner:
        """Load the model (once per process) and build its runner. Mutates and raises as `V1RunnerChoice.make`."""
        config = self._config
        if self._bookkeeping:
            return PaperBookkeepingRunner(config, emit)
        load_libraries()
        from engine.worker.sequence_runner import SequenceRunner

        loaded = self._load(config.num_blocks * config.block_size, config.max_model_len)
        runner = SequenceRunner(
            loaded.model, config=config, max_model_len=loaded.max_model_len, kernel_settings=loaded.settings, emit=emit, device=loaded.device
        )  # fmt: skip
        runner.layer_capture = self.layer_capture
        return runner


def choose_runner(config: SessionConfig, model_name: str, backend: str | None, interpreted_layers: InterpretedLayers) -> V1RunnerChoice:
    """The runner for these settings, not loaded yet. Raises InvalidInput for an unknown model or backend."""
    return V1RunnerChoice(config, model_name, backend, interpreted_layers)
