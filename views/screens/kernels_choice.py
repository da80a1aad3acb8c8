"""What the kernels screen is asked to show. All of it stands in the address; widgets and clicks change it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import streamlit as st

from views import state

T = TypeVar("T")

PLACE = ("scene", "step", "model", "backend", "layers")
"""Which run, and where in it."""
NUMBERS = ("layer", "keys", "program", "lane", "tile", "row", "token", "head", "kernel_block", "ranks", "rank", "interleave")
WORDS = ("part", "tiles", "kernel")
GRACE = 5.0
"""Seconds in which a click may still come with the address of before."""
_SEEN, _CHOSEN = "kernels:address", "kernels:chosen"


def widget(name: str) -> str:
    """The key of the widget that chooses `name`."""
    return f"kernels-pick-{name}"


class _Written(NamedTuple):
    """The address that this screen wrote last, the one before, and when (seconds)."""

    now: dict[str, str]
    before: dict[str, str]
    at: float


def _remember(address: dict[str, str]) -> None:
    written: _Written | None = state.kept(_SEEN, None)
    if written is None or written.now != address:
        state.keep(_SEEN, _Written(address, written.now if written else {}, time.monotonic()))


def _address() -> tuple[dict[str, str], bool]:
    """The address, and whether somebody came with it. A click that the browser sent before it knew of our last change to the address brings the one before:
    then ours counts."""
    address = st.query_params.to_dict()
    written: _Written | None = state.kept(_SEEN, None)
    if written is None or (address != written.now and (address != written.before or time.monotonic() - written.at > GRACE)):
        return address, True
    return written.now, False


def preset(key: str, value: object) -> None:
    """What the widget with this key shall show. Left alone where it shows that already: what is set is sent to the browser, and would undo a click that
    comes in while the page still runs."""
    if state.kept(key, None) != value:
        state.keep(key, value)


class Choices:
    """The choices of this browser, made anew in every run of the page. An address that somebody came with wins over what was chosen before."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """One sentence about the first thing in the address that cannot be used."""
        address, self._from_address = _address()
        self.place = {name: address[name] for name in PLACE if address.get(name)}
        self._values: dict[str, Any] = state.kept(_CHOSEN, {})
        if self._from_address:
            self._values = {name: address[name] for name in (*NUMBERS, *WORDS) if name in address}
            for name in (*NUMBERS, *WORDS):
                state.forget(widget(name))
        self._written: dict[str, str] = {}
        self.frame: int | None = None
        """The frame that is shown; None until it is known."""

    def pick(self, name: str, options: Sequence[T], default: T | None = None) -> T:
        """The choice for `name` among `options`, made ready for a widget with the key `widget(name)`. What is not among them is the default, the first
        option unless said; where the address asked for it, `problem` says so. Raises IndexError without options."""
        fallback = options[0] if default is None else default
        value: Any = state.kept(widget(name), self._values.get(name, fallback))
        if isinstance(value, str) and isinstance(fallback, int) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)
        if value not in options:
            if self._from_address and name in self._values:
                self.problem = self.problem or f"the address says {name}={value}, but {name} is {_either(options)}"
            value = fallback
        self.set(name, value)
        if value == fallback:
            self._written.pop(name, None)
        else:
            self._written[name] = str(value)
        return value  # type: ignore[no-any-return]

    def is_default(self, name: str) -> bool:
        """Whether what was picked for `name` is what nobody had to choose."""
        return name not in self._written

    def set(self, name: str, value: object) -> None:
        """Choose, before the widget is made in this run, or from a callback."""
        self._values[name] = value
        state.keep(_CHOSEN, self._values)
        preset(widget(name), value)

    def to_address(self) -> None:
        """Say in the address what was picked in this run and is no default, so that it can be passed on."""
        place = self.place if self.frame is None else {**self.place, "step": str(self.frame)}
        wanted = {"screen": "kernels", **{name: place[name] for name in PLACE if name in place}, **self._written}
        if st.query_params.to_dict() != wanted:
            st.query_params.from_dict(wanted)
        _remember(wanted)


def go_to(frame: int) -> None:
    """For callbacks: the same choices at another frame of the run."""
    st.query_params["step"] = str(frame)
    _remember(st.query_params.to_dict())


def choose(name: str, value: object) -> None:
    """For callbacks: choose `value` for the next run of the page."""
    values: dict[str, Any] = state.kept(_CHOSEN, {})
    values[name] = value
    state.keep(_CHOSEN, values)
    preset(widget(name), value)


def _either(options: Sequence[object]) -> str:
    numbers = [option for option in options if isinstance(option, int)]
    if len(numbers) == len(options) > 3 and list(range(numbers[0], numbers[0] + len(numbers))) == numbers:
        return f"a number from {numbers[0]} to {numbers[-1]}"
    return "one of " + ", ".join(map(str, options)) if len(options) > 1 else f"only {options[0]} here"
