"""What was launched: while somebody asks, every launch of a Triton kernel leaves its grid and its constants here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple


class CompilerOptions(NamedTuple):
    """What the compiler is told besides a kernel's constants."""

    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True)
class LaunchShape:
    """One launch of a kernel, without its tensors. `kernel`: the function's name (`paged_attention_kernel`, `reduce_splits_kernel`, `slot_mapping_kernel`,
    `reshape_and_cache_kernel`, `copy_pages_kernel`); `grid`: programs along each axis; `lanes`: of each program; `constants`: the kernel's constexpr
    arguments by name; `num_warps`, `num_stages`: what the compiler is told besides, where the launch is one for a GPU (Triton's own choice otherwise)."""

    kernel: str
    grid: tuple[int, ...]
    lanes: int
    constants: dict[str, int | bool | None] = field(default_factory=dict)
    num_warps: int | None = None
    num_stages: int | None = None


_recorder: ContextVar[list[LaunchShape] | None] = ContextVar("launches", default=None)


@contextmanager
def recorded_launches() -> Iterator[list[LaunchShape]]:
    """A list to which this thread's launches are added, in order, while the context lasts. The torch reference launches nothing."""
    launches: list[LaunchShape] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def recorder() -> list[LaunchShape] | None:
    """Where launches go now; None: nowhere."""
    return _recorder.get()
