"""How one version of a sequence differs from the one before, in as few values as possible, and how to get it back.

What is written depends on the elements alone, never on how they are kept in memory: equal sequences give equal differences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.trace.shared_sequence import ABSENT, SequenceEditor, SharedSequence

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Moves(NamedTuple, Generic[K, V]):
    """From one sequence to the next: take `out` keys, put `head` in front and `tail` behind, and `replace` elements where they stand. Or all of it: `whole`."""

    out: list[K]
    head: list[V]
    tail: list[V]
    replace: list[V]
    whole: list[V] | None = None


def find_moves(old: Sequence[V], new: Sequence[V], key: Callable[[V], K]) -> Moves[K, V] | None:
    """How to get from `old` to `new`, whose elements are known by `key`; None when they are equal.

    `whole` when nothing stays or a key stands twice. Otherwise what stays keeps its order; from where that fails on, the rest of `new` is `tail`.
    O(changes · log n) between versions of a `SharedSequence`, O(n) otherwise.
    """
    if new is old:
        return None
    if isinstance(old, SharedSequence) and isinstance(new, SharedSequence):
        changes = new.changes_since(old)
        if not changes:
            return None
        gone = {key(value): place for place, value, _ in changes if value is not ABSENT}
        come = {key(value): place for place, _, value in changes if value is not ABSENT}
        stood = [k for k in gone if k in come]
        incoming = come.keys() - gone.keys()
        if all(gone[k] == come[k] for k in stood) and len(new) - len(incoming) > 0:
            num_head = _run(new, incoming, key, 0, 1)
            num_tail = _run(new, incoming, key, -1, -1)
            if num_head + num_tail == len(incoming):
                return Moves(
                    out=[k for k in gone if k not in come],
                    head=[new[i] for i in range(num_head)],
                    tail=[new[i] for i in range(-num_tail, 0)],
                    replace=[new_value for _, _, new_value in changes if new_value is not ABSENT and key(new_value) in gone],
                )
    return _find_moves_by_content([*old], [*new], key)


def _run(new: SharedSequence[V], incoming: set[K], key: Callable[[V], K], start: int, step: int) -> int:
    """How many elements in a row, from one end, are new."""
    number = 0
    while number < len(incoming) and key(new[start + step * number]) in incoming:
        number += 1
    return number


def _find_moves_by_content(old: list[V], new: list[V], key: Callable[[V], K]) -> Moves[K, V] | None:
    if old == new:
        return None
    place_of = {key(value): index for index, value in enumerate(old)}
    new_keys = [key(value) for value in new]
    if len(place_of) < len(old) or len(set(new_keys)) < len(new) or not any(k in place_of for k in new_keys):
        return Moves([], [], [], [], new)
    start = next(index for index, k in enumerate(new_keys) if k in place_of)
    end, last = start, -1
    while end < len(new) and place_of.get(new_keys[end], -1) > last:
        last = place_of[new_keys[end]]
        end += 1
    kept = set(new_keys[start:end])
    return Moves(
        out=[k for k in place_of if k not in kept],
        head=new[:start],
        tail=new[end:],
        replace=[value for k, value in zip(new_keys[start:end], new[start:end], strict=True) if old[place_of[k]] != value],
    )


class Replay(Generic[K, V]):
    """Follows `Moves`, so that the versions share what they have in common."""

    def __init__(self, key: Callable[[V], K]) -> None:
        self._key = key
        self._editor: SequenceEditor[K, V] = SequenceEditor()

    def follow(self, moves: Moves[K, V] | None) -> SharedSequence[V]:
        """The next version. Raises KeyError or ValueError for moves that do not fit the version before."""
        if moves is None:
            return self._editor.sequence
        if moves.whole is not None:
            self._editor = SequenceEditor(self._pairs(moves.whole))
            return self._editor.sequence
        return self._editor.apply(moves.out, self._pairs(moves.head), self._pairs(moves.tail), self._pairs(moves.replace))

    def _pairs(self, values: list[V]) -> list[tuple[K, V]]:
        return [(self._key(value), value) for value in values]


def find_changes(old: Sequence[V], new: Sequence[V]) -> list[tuple[int, V]]:
    """(index, element) of `new` wherever it differs from `old` or goes beyond its end. O(changes · log n) between versions of a `SharedSequence`."""
    if new is old:
        return []
    if isinstance(old, SharedSequence) and isinstance(new, SharedSequence) and old.is_dense and new.is_dense:
        return [(index, value) for index, _, value in new.changes_since(old) if value is not ABSENT]
    num_old = len(old)
    return [(index, value) for index, value in enumerate(new) if index >= num_old or (old[index] is not value and old[index] != value)]


def apply_changes(old: SharedSequence[V], changes: list[tuple[int, V]], length: int) -> SharedSequence[V]:
    """What `find_changes` was given as `new`, of which `length` is the length. Raises IndexError for changes that do not lead there."""
    if length < 0 or any(index < 0 for index, _ in changes):
        raise IndexError("index out of range")
    if length < len(old):
        return SharedSequence([dict(changes).get(index, value) for index, value in enumerate(old[:length])])
    fresh = not len(old) and [index for index, _ in changes] == list(range(len(changes)))  # at once instead of one by one
    made = SharedSequence([value for _, value in changes]) if fresh else old.with_changes(dict(changes))
    if len(made) != length or not made.is_dense:
        raise IndexError("index out of range")
    return made
