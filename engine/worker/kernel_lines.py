"""Which lines of a kernel's source ran how often, while the interpreter ran it: there a program is a Python function, and each statement can count itself."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from engine.trace.closeup import KernelSource
from kernels import LaunchShape


class _Statement(NamedTuple):
    """`lines`: of the statement, of a compound one those before its body. `first_inside`: of a loop, the first statement of its body."""

    lines: range
    first_inside: int | None = None


class LinesRun:
    """By launch: how often each line ran (`lines_of`)."""

    def __init__(self) -> None:
        self._ran: dict[int, list[int]] = {}

    def lines_of(self, launch: int, kernel: str) -> dict[int, int]:
        """Line number -> how often its statement ran in all programs of the launch (its place in the recorded list), 0 for a statement that never did. A loop's
        header counts the iterations."""
        statements = _statements(kernel)
        ran = self._ran.get(launch, [0] * len(statements))
        return {
            line: ran[place if statement.first_inside is None else statement.first_inside]
            for place, statement in enumerate(statements)
            for line in statement.lines
        }

    def counters_now(self, launches: Sequence[LaunchShape], kernel: str) -> list[int]:
        """One number per statement of the kernel, which the programs of the latest launch count up."""
        return self._ran.setdefault(len(launches) - 1, [0] * len(_statements(kernel)))


@contextmanager
def counted_lines(launches: Sequence[LaunchShape]) -> Iterator[LinesRun]:
    """Count the lines of interpreted kernels while the context lasts; other threads' launches wait. `launches`: the growing list of
    `kernels.recorded_launches`, which tells what is running.

    The interpreter keeps each kernel as a Python function with the same lines; it is given one in which every statement counts itself first. (A trace function
    would be called for every function inside the interpreter as well, and make a launch take twice as long.)"""
    from triton.runtime.interpreter import InterpretedFunction

    from kernels.interpreter import LOCK

    run = LinesRun()
    known = InterpretedFunction.rewritten_fn
    with LOCK:
        former = {function: known.get(function) for function in map(_function, _kernels())}
        for kernel in _kernels():
            known[_function(kernel)] = _self_counting(kernel, functools.partial(run.counters_now, launches, kernel))
        try:
            yield run
        finally:
            for function, rewritten in former.items():
                if rewritten is None:
                    del known[function]
                else:
                    known[function] = rewritten


_RAN = "_ran"
_BEGIN = "_begin"


def _self_counting(kernel: str, begin: Callable[[], list[int]]) -> Any:
    """The kernel as the interpreter would rewrite it, but every statement first counts itself in the list that `begin` gives a program when it starts."""
    from triton.runtime import interpreter

    function = _function(kernel)
    names = {**vars(interpreter), **function.__globals__, _BEGIN: begin}
    exec(_self_counting_code(kernel), names)
    return names[function.__name__]


@functools.cache
def _self_counting_code(kernel: str) -> CodeType:
    from triton.runtime.interpreter import FunctionRewriter

    function = _function(kernel)
    rewriter = FunctionRewriter(function)
    rewriter.filename, rewriter.def_file_lineno = function.__code__.co_filename, source_of(kernel).first_line
    source = source_of(kernel)
    before = next(place for place, line in enumerate(source.lines) if line.startswith("def "))  # decorators
    rewriter.def_file_lineno += before
    tree = rewriter._transform_ast("\n".join(source.lines[before:]))
    place_of = {statement.lines.start: place for place, statement in enumerate(_statements(kernel))}

    def with_counters(body: list[ast.stmt]) -> list[ast.stmt]:
        counted: list[ast.stmt] = []
        for node in body:
            for name in ("body", "orelse"):
                if getattr(node, name, None):
                    setattr(node, name, with_counters(getattr(node, name)))
            if node.lineno in place_of:
                counted += ast.parse(f"{_RAN}[{place_of[node.lineno]}] += 1").body
            counted.append(node)
        return counted

    definition = tree.body[0]
    definition.body = [*ast.parse(f"{_RAN} = {_BEGIN}()").body, *with_counters(definition.body)]
    return compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")


@functools.cache
def source_of(kernel: str) -> KernelSource:
    """The source of a kernel by its function's name."""
    function = _function(kernel)
    lines, first_line = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    return KernelSource(kernel=kernel, file=f"kernels/{file.name}", first_line=first_line, lines=[line.rstrip("\n") for line in lines])


@functools.cache
def _kernels() -> dict[str, Any]:
    import kernels

    modules = [importlib.import_module(f"kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__) if module.name.startswith("triton_")]
    found: dict[str, Any] = {}
    for module in modules:
        found.update({name: member for name, member in vars(module).items() if name.endswith("_kernel") and hasattr(member, "fn")})
    return found


def _function(kernel: str) -> Any:
    return _kernels()[kernel].fn


@functools.cache
def _statements(kernel: str) -> list[_Statement]:
    """Every statement of the kernel's body that runs, with the line numbers of the file."""
    source = source_of(kernel)
    definition = ast.parse(textwrap.dedent("\n".join(source.lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    found: list[_Statement] = []

    def collect(body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            last = node.end_lineno or node.lineno
            if isinstance(node, ast.If | ast.While):
                last = node.test.end_lineno or node.lineno
            elif isinstance(node, ast.For):
                last = node.iter.end_lineno or node.lineno
            place = len(found)
            lines = range(source.first_line + node.lineno - 1, source.first_line + last)
            found.append(_Statement(lines))
            if isinstance(node, ast.If | ast.While | ast.For):
                if not isinstance(node, ast.If):
                    found[place] = _Statement(lines, len(found))
                collect(node.body)
                collect(node.orelse)

    collect(definition.body)
    return found
