"""The interpreter in a process that also compiles, in several threads, and in a process that interprets everything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import aot
from kernels.interpreter import launch


def _language() -> dict[str, object]:
    modules = {"tl": tl, "core": tl.core, "standard": tl.standard, "math": tl.math, "tensor": tl.tensor, "dtype": tl.dtype}
    return {f"{name}.{key}": member for name, module in modules.items() for key, member in vars(module).items() if not key.startswith("__")}


def _attend(batch, backend: str) -> torch.Tensor:
    return kernels.paged_attention(*batch.arguments, scale=0.3, backend=backend)


def test_interpret_compile_interpret_in_one_process(batch_of, tmp_path, monkeypatch):
    """Triton fixes this choice when a kernel is decorated; here each launch makes it anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # an empty cache, so that the compiler really runs
    batch = batch_of([3, 1], [7, 10])
    expected = _attend(batch, "torch")
    variant = next(variant for variant in aot.variants() if "decode fp32" in variant.name)
    torch.testing.assert_close(_attend(batch, "interpret"), expected)
    assert len(aot.compile_variant(variant, "cuda 80").binary) > 1000
    torch.testing.assert_close(_attend(batch, "interpret"), expected)
    assert len(aot.compile_variant(variant, "cuda 90").binary) > 1000


def test_a_launch_leaves_triton_as_it_found_it(batch_of):
    batch = batch_of([3, 1], [7, 10])
    _attend(batch, "interpret")  # the first launch may import parts of Triton
    options = triton.runtime.interpreter.interpreter_builder.options
    before = _language()
    _attend(batch, "interpret")
    after = _language()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []
    assert triton.runtime.interpreter.interpreter_builder.options is options


@triton.jit
def _failing_kernel(pointer, tile: tl.constexpr):
    tl.store(pointer + tl.arange(0, tile), tl.load(pointer + tl.arange(0, 2 * tile)))


def test_a_launch_that_fails_leaves_triton_as_it_found_it(batch_of):
    batch = batch_of([3, 1], [7, 10])
    expected = _attend(batch, "interpret")
    before = _language()
    with pytest.raises(triton.runtime.errors.InterpreterError):
        launch(_failing_kernel, (1,), torch.zeros(8), tile=4)
    after = _language()
    assert [name for name in before if before[name] is not after[name]] == []
    assert torch.equal(_attend(batch, "interpret"), expected)


def test_two_threads_take_turns(batch_of):
    """Without the lock, launches of two threads fail or read each other's program ids."""
    batches = [batch_of([3, 1], [7, 10], seed=1), batch_of([1, 6, 1], [9, 6, 21], seed=2)]
    expected = [_attend(batch, "torch") for batch in batches]
    problems: list[object] = []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        for _ in range(20):
            try:
                torch.testing.assert_close(_attend(batches[index], "interpret"), expected[index])
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


_EVERYTHING_INTERPRETED = """
import torch, kernels
torch.manual_seed(0)
key, value = torch.randn(6, 1, 8), torch.randn(6, 1, 8)
results = {}
for backend in ("torch", "interpret"):
    mapping = torch.zeros(8, dtype=torch.int64)
    starts = torch.tensor([0, 5, 6], dtype=torch.int32)
    table = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32)
    kernels.compute_slot_mapping(starts, torch.tensor([0, 1, 2, 3, 4, 0]), table, mapping, block_size=4, backend=backend)
    keys, values = torch.zeros(6, 4, 1, 8), torch.zeros(6, 4, 1, 8)
    kernels.reshape_and_cache(key, value, keys, values, mapping[:6], backend=backend)
    kernels.copy_blocks([keys], [values], torch.tensor([[3, 4]]), backend=backend)
    lengths = torch.tensor([5, 1], dtype=torch.int32)
    out = kernels.paged_attention(torch.ones(6, 2, 8), keys, values, table, starts, lengths, scale=0.3, backend=backend)
    results[backend] = (mapping, keys, out)
for reference, interpreted in zip(results["torch"], results["interpret"]):
    torch.testing.assert_close(interpreted, reference)
print(mapping.tolist())
try:
    kernels.choose_backend("interpret")
    from kernels import aot
    aot.compile_variant(aot.variants()[0], "cuda 80")
except kernels.UnknownBackend as error:
    print(error)
"""


def test_the_same_calls_work_when_triton_interprets_everything():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _EVERYTHING_INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[12, 13, 14, 15, 4, 8, -1, -1]",
        "Nothing can be compiled while TRITON_INTERPRET is set; unset it and start again.",
    ]
