"""What is wrong with a scenario, said so that its author can mend it: ``file:line: field.path: what, and how to mend it``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from engine.errors import InvalidInput

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a scenario: names of fields, positions in lists (from 0) and block ids."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `line` counts from 1, None when the scenario did not come from a text; an empty `path` means the file as a whole."""

    file: str
    line: int | None
    path: Path
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        field = path_text(self.path)
        return f"{place}: {field}: {self.message}" if field else f"{place}: {self.message}"


class ScenarioError(InvalidInput):
    """A scenario cannot be used. `problems` has all that was found, in the order of the file; the message has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: p.line or 0))
        super().__init__("\n".join(map(str, self.problems)))


def path_text(path: Path) -> str:
    """``("requests", 0, "prompt")`` as ``requests[0].prompt``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
