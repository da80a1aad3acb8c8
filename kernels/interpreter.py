"""Run one Triton kernel on the CPU, in a process that may also compile kernels.

Triton decides when a function is decorated whether `@triton.jit` compiles or interprets. A session cannot wait for that: it switches layers
between backends and compiles ahead of time next to an interpreted launch. So the raw function of a kernel is wrapped as an interpreted one,
and for the duration of a launch `triton.language` is patched: its builtins as the interpreter itself does it (but found once, not in every
launch and every library call, which would double a launch's time), and its library functions (max, sum ...) by interpreted twins.

Patching changes modules, and the interpreter keeps the program id in a global, so launches of all threads take turns under one lock.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.experimental.gluon  # imported on the first launch otherwise, and it refuses to load while the library functions are swapped
import triton.language
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from kernels import interpreter_types

LOCK = threading.RLock()
"""Held during every interpreted launch and every compilation: both read the same module attributes."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` (a decorated Triton function) for every program of `grid`, one after the other, on CPU tensors. `constants`: what is given by name.

    Does what triton.runtime.interpreter.GridExecutor does, except for copying arguments from a device and back; here they are on the CPU.
    Raises triton.runtime.errors.InterpreterError for what goes wrong inside the kernel.
    """
    # A program without queries, as a GPU's host reserves them, divides nothing by nothing, and stores none of it.
    with LOCK, _interpreted_language(), np.errstate(invalid="ignore"):
        function = _interpreted(kernel.fn).rewrite()
        values = [_argument(argument) for argument in arguments]
        named = {name: _argument(value) if isinstance(value, torch.Tensor) else value for name, value in constants.items()}
        builder = triton_interpreter.interpreter_builder
        sizes = grid + (1,) * (3 - len(grid))
        builder.set_grid_dim(*sizes)
        for place in itertools.product(*map(range, sizes)):
            builder.set_grid_idx(*place)
            try:
                function(*values, **named)
            except Exception as error:
                raise InterpreterError(repr(error)) from error


_pointer_types: dict[torch.dtype, Any] = {}


def _argument(argument: Any) -> Any:
    """triton.runtime.interpreter._implicit_cvt, which spells out and parses a pointer's type each time."""
    if not isinstance(argument, torch.Tensor):
        return triton_interpreter._implicit_cvt(argument)
    pointer_type = _pointer_types.get(argument.dtype)
    if pointer_type is None:
        pointer_type = _pointer_types[argument.dtype] = triton_interpreter._implicit_cvt(argument).type
    address = np.array([argument.data_ptr()], dtype=np.uint64)
    return triton.language.tensor(triton_interpreter.TensorHandle(address, pointer_type), pointer_type)


@functools.cache
def _interpreted(function: Any) -> Any:
    return triton_interpreter.InterpretedFunction(function)


class _Patch(NamedTuple):
    owner: Any
    name: str
    original: Any
    interpreted: Any


@functools.cache
def _patches() -> tuple[_Patch, ...]:
    """Everything that differs while a kernel is interpreted; found once, under the lock."""
    language = triton.language
    # The interpreter patches what it finds among a function's globals; this function sees all of the language.
    scope = triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for owner, name, original in scope._changes:
        found.setdefault((id(owner), name), (owner, name, original))
    patches = [_Patch(owner, name, original, _without_detour(getattr(owner, name))) for owner, name, original in found.values()]
    scope.restore()
    for module in (language, language.core, language.standard, language.math, language.random):
        patches += [_Patch(module, name, member, _interpreted(member.fn)) for name, member in vars(module).items() if isinstance(member, JITFunction)]
    # What is patched here need not be patched again by the interpreter, for each launch and each call of a library function.
    nothing = SimpleNamespace(restore=lambda: None)
    patches.append(_Patch(triton_interpreter, "_patch_lang", triton_interpreter._patch_lang, lambda function: nothing))
    builder = triton_interpreter.interpreter_builder
    patches.append(_Patch(language.core.block_type, "__init__", language.core.block_type.__init__, interpreter_types.block_type_init))
    patches.append(_Patch(language.tensor, "__init__", language.tensor.__init__, interpreter_types.tensor_init))
    patches.append(_Patch(triton_interpreter, "_get_np_dtype", triton_interpreter._get_np_dtype, interpreter_types.numpy_dtype))
    # Checking every integer sum and product for overflow would take a third of a launch.
    patches.append(_Patch(builder, "options", builder.options, dataclasses.replace(builder.options, sanitize_overflow=False)))
    return tuple(patches)


def _without_detour(interpreted: Any) -> Any:
    """The interpreter wraps a builtin that wraps a function, for every operation; one wrapper is enough."""
    member = (getattr(interpreted, "__kwdefaults__", None) or {}).get("member")
    function = getattr(member, "__wrapped__", None)
    if function is None:
        return interpreted
    semantic = triton_interpreter.interpreter_semantic

    def builtin(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return builtin


@contextmanager
def _interpreted_language() -> Iterator[None]:
    patches = _patches()
    try:
        for owner, name, _, interpreted in patches:
            setattr(owner, name, interpreted)
        yield
    finally:
        for owner, name, original, _ in patches:
            if original is triton_interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
