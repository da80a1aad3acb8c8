"""A close-up of the kernels at a frame of a scene: one call for a screen or a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.libraries import load_libraries
from engine.session_base import InterpretedLayers, SessionBase
from scenarios.runner import open_session
from scenarios.schema import Scenario

if TYPE_CHECKING:
    from engine.trace.closeup import CompiledKernel, KernelCloseup


def closeup_at(
    scene: Scenario | str | SessionBase[Any, Any],
    frame_seq: int,
    layer: int | None = None,
    tile: int | None = None,
    *,
    model: str | None = None,
    backend: str | None = None,
    interpreted_layers: InterpretedLayers = None,
) -> KernelCloseup:
    """What the kernels do in attention layer `layer` (None: the first) in the engine step that frame `frame_seq` belongs to.

    scene: the id of a scene, a scenario, or a session of one, which is left alone; `model`, `backend` and `interpreted_layers` as in `open_session`, and only
    without a session, which knows its own. tile: keys per iteration of the attention kernel, a power of two; None: as many as on a GPU.

    The run is made once more up to that step, on the CPU: keep what you get. Raises what `open_session` and `engine.worker.closeup.kernel_closeup` raise.
    """
    load_libraries()
    from engine.worker.closeup import kernel_closeup

    session = scene if isinstance(scene, SessionBase) else open_session(scene, model=model, backend=backend, interpreted_layers=interpreted_layers)
    return kernel_closeup(session, frame_seq, layer, tile)


def compiled_at(closeup: KernelCloseup) -> list[CompiledKernel]:
    """The kernels of a close-up as compiled for GPUs that need not be there: sizes, registers, spills. Takes seconds the first time; raises nothing."""
    load_libraries()
    from engine.worker.closeup_compiled import compiled_kernels

    return compiled_kernels(closeup)
