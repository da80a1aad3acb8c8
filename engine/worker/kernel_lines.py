"""Which lines of a kernel's source ran how often, while the interpreter ran it: its programs are Python functions with the line numbers of the source."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
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
        self._steps: dict[int, Counter[tuple[int | None, int]]] = {}

    def lines_of(self, launch: int, kernel: str) -> dict[int, int]:
        """Line number -> how often its statement ran in all programs of the launch (its place in the recorded list), 0 for a statement that never did. A loop's
        header counts the iterations."""
        statements = _statements(kernel)
        steps = self._steps.get(launch, Counter())
        entered = Counter[int]()
        for (_, entered_one), count in steps.items():
            entered[entered_one] += count
        found: dict[int, int] = {}
        for place, statement in enumerate(statements):
            count = entered[place] if statement.first_inside is None else steps[place, statement.first_inside]
            found.update(dict.fromkeys(statement.lines, count))
        return found

    def note(self, launch: int, kernel: str) -> Any:
        """A local trace function for one program."""
        steps, place_of = self._steps.setdefault(launch, Counter()), _statement_of_line(kernel)
        before: int | None = None

        def on_event(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                now = place_of.get(frame.f_lineno)
                if now is not None and now != before:  # a statement of several lines goes to and fro between them
                    steps[before, now] += 1
                    before = now
            return on_event

        return on_event


@contextmanager
def counted_lines(launches: Sequence[LaunchShape]) -> Iterator[LinesRun]:
    """Count the lines that kernels run in this thread while the context lasts. `launches`: the growing list of `kernels.recorded_launches`, which tells what is
    running. Makes an interpreted launch slower. A debugger's or a coverage tool's trace function comes back afterwards."""
    run = LinesRun()
    files = {kernel: _function(kernel).__code__.co_filename for kernel in _kernels()}

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_name
        if name in files and frame.f_code.co_filename == files[name] and launches and launches[-1].kernel == name:
            return run.note(len(launches) - 1, name)
        return None

    former = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield run
    finally:
        sys.settrace(former)


@functools.cache
def source_of(kernel: str) -> KernelSource:
    """The source of a kernel by its function's name."""
    function = _function(kernel)
    lines, first_line = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    return KernelSource(kernel=kernel, file=f"kernels/{file.name}", first_line=first_line, lines=[line.rstrip("\n") for line in lines])


@functools.cache
def _kernels() -> dict[str, Any]:
    from kernels import triton_attention, triton_cache

    found = {}
    for module in (triton_attention, triton_cache):
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


@functools.cache
def _statement_of_line(kernel: str) -> dict[int, int]:
    return {line: place for place, statement in enumerate(_statements(kernel)) for line in statement.lines}
