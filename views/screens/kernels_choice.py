"""What the kernels screen is asked to show. All of it stands in the address; widgets and clicks change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import streamlit as st

from views import state

T = TypeVar("T")

PLACE = ("scene", "step", "model", "backend", "layers")
"""Which run, and where in it."""
NUMBERS = ("layer", "keys", "program", "lane", "tile", "row", "token", "head", "kernel_block", "ranks", "rank", "interleave")
WORDS = ("part", "tiles", "kernel")
_SEEN, _CHOSEN = "kernels:address", "kernels:chosen"


def widget(name: str) -> str:
    """The key of the widget that chooses `name`."""
    return f"kernels-pick-{name}"


class Choices:
    """The choices of this browser, made anew in every run of the page. An address that somebody came with wins over what was chosen before."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """One sentence about the first thing in the address that cannot be used."""
        address = st.query_params.to_dict()
        self.place = {name: address[name] for name in PLACE if address.get(name)}
        self._values: dict[str, Any] = state.kept(_CHOSEN, {})
        self._from_address = address != state.kept(_SEEN, None)
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
        state.keep(widget(name), value)

    def to_address(self) -> None:
        """Say in the address what was picked in this run and is no default, so that it can be passed on."""
        place = self.place if self.frame is None else {**self.place, "step": str(self.frame)}
        wanted = {"screen": "kernels", **{name: place[name] for name in PLACE if name in place}, **self._written}
        if st.query_params.to_dict() != wanted:
            st.query_params.from_dict(wanted)
        state.keep(_SEEN, wanted)


def go_to(frame: int) -> None:
    """For callbacks: the same choices at another frame of the run."""
    st.query_params["step"] = str(frame)
    state.keep(_SEEN, st.query_params.to_dict())


def choose(name: str, value: object) -> None:
    """For callbacks: choose `value` for the next run of the page."""
    values: dict[str, Any] = state.kept(_CHOSEN, {})
    values[name] = value
    state.keep(_CHOSEN, values)
    state.keep(widget(name), value)


def _either(options: Sequence[object]) -> str:
    numbers = [option for option in options if isinstance(option, int)]
    if len(numbers) == len(options) > 3 and list(range(numbers[0], numbers[0] + len(numbers))) == numbers:
        return f"a number from {numbers[0]} to {numbers[-1]}"
    return "one of " + ", ".join(map(str, options))
