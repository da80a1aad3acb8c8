"""Which layers are interpreted, and the figure under which a comparison is reported."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, InvalidInput
from engine.worker.kernel_settings import KernelSettings, agrees_within, choose_kernel_settings
from kernels import Backend

TORCH, INTERPRET, TRITON = (Backend(name, "test") for name in ("torch", "interpret", "triton"))


@pytest.mark.parametrize(
    ("settings", "compared", "names"),
    [
        (KernelSettings(TORCH), (), ["torch"] * 3),
        (KernelSettings(TORCH, (1,)), (1,), ["torch", "interpret", "torch"]),
        (KernelSettings(TORCH, "all"), (0, 1, 2), ["interpret"] * 3),
        (KernelSettings(INTERPRET), (0, 1, 2), ["interpret"] * 3),
        (KernelSettings(TRITON, (2, 0)), (0, 2), ["triton"] * 3),
        (KernelSettings(TRITON), (), ["triton"] * 3),
    ],
)
def test_layers(settings: KernelSettings, compared: tuple[int, ...], names: list[str]) -> None:
    assert settings.compared_layers(3) == compared
    assert [b.name for b in settings.layer_backends(3)] == names


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidInput, match="Layer 3 cannot be interpreted: the model's 3 layers are 0 to 2"):
        KernelSettings(TORCH, (3,)).compared_layers(3)


@pytest.mark.parametrize(
    ("difference", "bound"), [(0.0, 1e-9), (3e-12, 1e-9), (1e-9, 1e-9), (1.1e-9, 1e-8), (9e-7, 1e-6), (1e-6, 1e-6), (0.02, 0.1), (1.0, 1.0), (7.0, 10.0)]
)
def test_agreement_is_the_smallest_power_of_ten_that_bounds_the_difference(difference: float, bound: float) -> None:
    assert agrees_within(difference) == bound


@pytest.mark.parametrize("difference", [float("nan"), float("inf")])
def test_a_difference_that_is_no_number_is_an_error(difference: float) -> None:
    with pytest.raises(EngineError, match="never written"):
        agrees_within(difference)


def test_default_is_the_reference_with_the_first_layer_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWALK_BACKEND", raising=False)
    settings = choose_kernel_settings(None, num_layers=4)
    assert (settings.backend.name, settings.interpreted_layers) == ("torch", (0,))
    assert settings.backend.reason


def test_all_layers_are_spelled_out() -> None:
    assert choose_kernel_settings("torch", "all", num_layers=3).interpreted_layers == (0, 1, 2)
    assert choose_kernel_settings("interpret", None, num_layers=3).interpreted_layers == (0, 1, 2)
    assert choose_kernel_settings("torch", (), num_layers=3).interpreted_layers == ()


@pytest.mark.parametrize("bad", ["cuda", "triton"])
def test_a_backend_that_cannot_run_here_is_refused_in_one_sentence(bad: str) -> None:
    with pytest.raises(InvalidInput, match=bad):
        choose_kernel_settings(bad, num_layers=3)


def test_without_triton_nothing_is_interpreted_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWALK_BACKEND", raising=False)
    monkeypatch.setattr("kernels.backend.importlib.util.find_spec", lambda name: None)
    assert choose_kernel_settings(None, num_layers=3).interpreted_layers == ()
    with pytest.raises(InvalidInput, match="interpret"):
        choose_kernel_settings(None, (1,), num_layers=3)
