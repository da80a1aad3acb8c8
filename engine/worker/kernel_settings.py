"""Which layers run on which kernels, and how the difference between kernel and reference is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError, InvalidInput
from kernels import Backend, UnknownBackend, choose_backend


@dataclass(frozen=True)
class KernelSettings:
    """`backend` runs every layer, except that on "torch" the `interpreted_layers` run through Triton's interpreter as well: their result is compared with
    the reference at every step, and it is the Triton result that goes on.

    On "interpret" all layers are interpreted and compared, whatever `interpreted_layers` says. On "triton" all layers run compiled, and the
    `interpreted_layers` are compared with the torch reference.
    """

    backend: Backend
    interpreted_layers: tuple[int, ...] | Literal["all"] = ()

    def compared_layers(self, num_layers: int, attention_layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Layers whose Triton result is compared with the torch reference, ascending. `attention_layers`: those that have attention, None for all of them.
        Raises InvalidInput for a layer the model does not have, and for one without attention."""
        having = tuple(range(num_layers)) if attention_layers is None else tuple(attention_layers)
        if self.interpreted_layers == "all" or self.backend.name == "interpret":
            return having
        for layer in self.interpreted_layers:
            if not 0 <= layer < num_layers:
                raise InvalidInput(f"Layer {layer} cannot be interpreted: the model's {num_layers} layers are 0 to {num_layers - 1}; choose one of these.")
            if layer not in having:
                raise InvalidInput(
                    f"Layer {layer} cannot be interpreted: it keeps a recurrent state and runs no attention kernel; choose among the attention layers "
                    f"{', '.join(map(str, having))}."
                )
        return tuple(sorted(set(self.interpreted_layers)))

    def layer_backends(self, num_layers: int, attention_layers: Sequence[int] | None = None) -> tuple[Backend, ...]:
        """The backend whose result goes on, per layer. Raises as `compared_layers`, and InvalidInput where layers are to be interpreted and Triton is not
        there."""
        compared = set(self.compared_layers(num_layers, attention_layers))
        if self.backend.name != "torch" or not compared:
            return (self.backend,) * num_layers
        try:
            interpret = choose_backend("interpret", "cpu")
        except UnknownBackend as error:
            raise InvalidInput(str(error)) from error
        return tuple(interpret if layer in compared else self.backend for layer in range(num_layers))


def choose_kernel_settings(
    requested: str | None,
    interpreted_layers: Sequence[int] | Literal["all"] | None = None,
    *,
    num_layers: int,
    device: str = "cpu",
    attention_layers: Sequence[int] | None = None,
) -> KernelSettings:
    """Settings for this machine, with the compared layers spelled out as ids. `requested`: a backend's name, or None for `kernels.choose_backend`'s choice.

    `interpreted_layers` None: the first layer with attention is compared with the reference wherever a Triton kernel can run (compiled or interpreted), and
    none elsewhere. `attention_layers`: those that have attention, None for all of them. Raises InvalidInput for a backend that cannot run here and for a layer
    that the model does not have or that has no attention.
    """
    try:
        backend = choose_backend(requested, device)
    except UnknownBackend as error:
        raise InvalidInput(str(error)) from error
    if interpreted_layers is None:
        interpreted_layers = (attention_layers or (0,))[:1] if backend.name == "triton" or (backend.name == "torch" and _interpreter_runs()) else ()
    layers: tuple[int, ...] | Literal["all"] = "all" if interpreted_layers == "all" else tuple(interpreted_layers)
    settings = KernelSettings(backend, layers)
    settings = KernelSettings(backend, settings.compared_layers(num_layers, attention_layers))
    settings.layer_backends(num_layers, attention_layers)  # refuses now, not in the middle of a step
    return settings


def _interpreter_runs() -> bool:
    try:
        choose_backend("interpret", "cpu")
    except UnknownBackend:
        return False
    return True


def agrees_within(difference: float) -> float:
    """The smallest power of ten that is not below `difference`, and never below 1e-9. Raises EngineError when the difference is not a number:
    then the kernel read something that was never written."""
    if not math.isfinite(difference):
        raise EngineError(
            "The Triton kernel and the torch reference differ by something that is not a number, so one of them read a slot that was never written; "
            "please report this scenario."
        )
    exponent = -9
    while float(f"1e{exponent}") < difference:
        exponent += 1
    return float(f"1e{exponent}")
