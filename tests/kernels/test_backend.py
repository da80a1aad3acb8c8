"""Which backend runs, who may say so, and what is said when a wish cannot be granted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import kernels
from kernels.__main__ import main
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _no_outside_wish(monkeypatch):
    monkeypatch.delenv("PAGEWALK_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def without_triton(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find_spec(name, *rest))


def test_the_cpu_runs_the_reference():
    assert kernels.choose_backend().name == "torch"


def test_a_cuda_device_runs_the_compiled_kernels(with_cuda):
    assert kernels.choose_backend(device="cuda").name == "triton"
    assert kernels.choose_backend(device="cuda:1").name == "triton"
    assert kernels.choose_backend().name == "torch"  # the tensors decide, not the machine


@pytest.mark.parametrize("name", ["torch", "interpret"])
def test_request_beats_environment_beats_device(monkeypatch, with_cuda, name):
    monkeypatch.setenv("PAGEWALK_BACKEND", name)
    chosen = kernels.choose_backend(device="cuda")
    assert chosen.name == name
    assert "PAGEWALK_BACKEND" in chosen.reason
    assert kernels.choose_backend("triton", device="cuda").name == "triton"


@pytest.mark.parametrize("wish", ["tritom", "", "Torch", "cuda"])
def test_unknown_names_are_refused_with_the_choices(wish):
    with pytest.raises(kernels.UnknownBackend, match=f"'{wish}'.*triton, interpret, torch"):
        kernels.choose_backend(wish)


def test_what_the_environment_asks_for_in_vain_is_refused_with_the_variable(monkeypatch):
    monkeypatch.setenv("PAGEWALK_BACKEND", "fast")
    with pytest.raises(kernels.UnknownBackend, match=r"There is no backend 'fast' \(PAGEWALK_BACKEND asks for it\); choose one of triton, interpret, torch"):
        kernels.choose_backend()
    monkeypatch.setenv("PAGEWALK_BACKEND", "triton")
    with pytest.raises(kernels.UnknownBackend, match=r"'triton' cannot run here \(PAGEWALK_BACKEND asks for it\): it needs a CUDA device"):
        kernels.choose_backend()


BROKEN = """
import sys
import kernels
from kernels.backend import UnknownBackend
print(kernels.choose_backend().name)
try:
    kernels.choose_backend("interpret")
except UnknownBackend as error:
    print(error)
"""


def test_a_triton_that_cannot_be_loaded_is_as_good_as_none(tmp_path):
    """A new process: here, Triton has been loaded already."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text('raise ImportError("libcuda.so.1: cannot open shared object file")', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=True, env=environment)
    name, said = done.stdout.splitlines()
    assert name == "torch"
    assert said == (
        "Backend 'interpret' cannot run here: Triton is installed but cannot be loaded (libcuda.so.1: cannot open shared object file); choose one of torch."
    )


def test_compiled_kernels_need_a_cuda_device(monkeypatch):
    with pytest.raises(kernels.UnknownBackend, match="CUDA device and the tensors are on cpu; choose one of interpret, torch"):
        kernels.choose_backend("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(kernels.UnknownBackend, match="finds no CUDA device"):
        kernels.choose_backend("triton", device="cuda")


def test_nothing_compiles_while_everything_is_interpreted(monkeypatch, with_cuda):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(kernels.UnknownBackend, match="TRITON_INTERPRET is set"):
        kernels.choose_backend("triton", device="cuda")
    assert kernels.choose_backend(device="cuda").name == "torch"


def test_without_triton_only_the_reference_remains(without_triton, with_cuda):
    assert kernels.choose_backend(device="cuda").name == "torch"
    with pytest.raises(kernels.UnknownBackend, match="Triton is not installed; choose one of torch"):
        kernels.choose_backend("interpret")


def test_a_triton_that_cannot_switch_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.9.0")
    with pytest.raises(kernels.UnknownBackend, match=r"Triton 3\.9 interprets only when TRITON_INTERPRET=1"):
        kernels.choose_backend("interpret")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.choose_backend("interpret").name == "interpret"


@pytest.mark.parametrize("name", kernels.BACKENDS)
def test_reasons_are_one_sentence_that_names_the_backend(with_cuda, name):
    reason = kernels.choose_backend(name, device="cuda").reason
    assert reason.startswith(f"{name}: ")
    assert reason.endswith(".")
    assert "\n" not in reason


def test_operations_take_a_backend_or_its_name():
    cache = torch.randn(4, 2, 1, 3)
    kernels.copy_blocks([cache], [cache.clone()], torch.tensor([[1, 2]]), backend=kernels.choose_backend("torch"))
    kernels.copy_blocks([cache], [cache.clone()], torch.tensor([[1, 3]]), backend="torch")
    assert torch.equal(cache[1], cache[2])
    assert torch.equal(cache[1], cache[3])
    with pytest.raises(kernels.UnknownBackend, match="'gpu'"):
        kernels.copy_blocks([cache], [cache], torch.tensor([[1, 3]]), backend="gpu")


def test_importing_the_package_loads_neither_torch_nor_triton():
    """A screen may ask for the choices without paying two seconds; and macOS has no Triton at all."""
    code = "import sys, kernels; kernels.choose_backend(); print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reference_runs_without_triton():
    """With Triton out of reach (as on macOS) the four operations still work."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "mapping = torch.zeros(3, dtype=torch.int64)\n"
        "kernels.compute_slot_mapping(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1]),"
        " torch.tensor([[3]], dtype=torch.int32), mapping, block_size=4, backend='torch')\n"
        "print(mapping.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[12, 13, -1]"


def test_command_line_names_the_backend(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("torch: ")
    assert main(["--backend", "nonsense"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "'nonsense'" in captured.err
