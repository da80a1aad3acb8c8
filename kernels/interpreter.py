"""Run one Triton kernel on the CPU, in a process that may also compile kernels.

Triton decides at import time whether `@triton.jit` compiles or interprets. A session cannot wait for that: it switches layers between backends
and compiles ahead of time next to an interpreted launch. So the raw function of a kernel is wrapped as an interpreted one, and for the
duration of a launch the library functions of `triton.language` (max, sum, zeros ...) are swapped for interpreted ones and the builtins patched.

Interpreting patches modules and keeps the program id in a global, so launches of all threads of the process take turns under one lock.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.experimental.gluon  # imported on the first launch otherwise, and it refuses to load while the library functions are swapped
import triton.language
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import JITFunction

LOCK = threading.RLock()
"""Held during every interpreted launch and every compilation: both read the same module attributes."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` (a decorated Triton function) for every program of `grid`, one after the other, on CPU tensors."""
    with LOCK, _interpreted_language():
        _interpreted(kernel.fn)[grid](*arguments, **constants)


class _LibraryFunction(triton_interpreter.InterpretedFunction):  # type: ignore[misc]
    """A function of triton.language, called from a kernel. Triton's own twin patches the whole language again at each call (1 ms)."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.rewrite()(*arguments, **keywords)


@functools.cache
def _interpreted(function: Any) -> Any:
    return triton_interpreter.InterpretedFunction(function)


@functools.cache
def _library_function(function: Any) -> Any:
    return _LibraryFunction(function)


@functools.cache
def _library_functions() -> tuple[tuple[ModuleType, str, Any], ...]:
    """Where triton.language keeps compiled functions, and the interpreted twin of each. Empty when Triton interprets everything anyway."""
    found = []
    for module in (triton.language, triton.language.core, triton.language.standard, triton.language.math, triton.language.random):
        for name, member in vars(module).items():
            if isinstance(member, JITFunction):
                found.append((module, name, _library_function(member.fn)))
    return tuple(found)


@contextmanager
def _interpreted_language() -> Iterator[None]:
    originals = [(module, name, getattr(module, name)) for module, name, _ in _library_functions()]
    # An interpreted library function patches triton.language.core and never restores it; patching it first, here, restores it at the end.
    everything = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})
    scope = triton_interpreter._patch_lang(everything)
    builder = triton_interpreter.interpreter_builder
    options = builder.options
    # Checking every sum and product for overflow would take a third of a launch.
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        for module, name, twin in _library_functions():
            setattr(module, name, twin)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
        builder.options = options
        scope.restore()
