"""Sequences that share what they have in common, so that two thousand frames cost little more than one.

A `SharedSequence` keeps its elements in a tree of small nodes. Changing k of n elements makes a new sequence in O(k log n) and leaves the old one as it
was; everything but the nodes on the way to the changed elements is the same objects in both, which is also what makes comparing two versions cheap.

Every element has a place, an int. Places may be empty, so an element can leave the middle of a queue without anybody moving up, and they go on below 0,
so a queue can grow at its head. What reads the sequence never sees places: it sees the elements in order, from index 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar, overload

BITS: Final = 5
WIDTH: Final = 1 << BITS
"""Children of a node."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Absent(Enum):
    """What an empty place holds."""

    ABSENT = 0


ABSENT: Final = Absent.ABSENT
"""Stands where a place is empty."""


class _Node:
    """`items`: WIDTH elements or ABSENT in a leaf, WIDTH nodes or None further up. `count`: elements below."""

    __slots__ = ("count", "items")

    def __init__(self, count: int, items: tuple[Any, ...]) -> None:
        self.count = count
        self.items = items


_EMPTY_LEAF: Final = (ABSENT,) * WIDTH
_EMPTY_INNER: Final = (None,) * WIDTH


class SharedSequence(Sequence[T]):
    """An immutable sequence; equal to a tuple or list of the same elements, and hashed like the tuple. Reading one element is O(log n), all of them O(n).

    Made by `SharedSequence(items)`, which puts them at places 0, 1, ..., and from then on by `with_changes`.
    """

    __slots__ = ("_base", "_dense", "_height", "_root")

    def __init__(self, items: Iterable[T] = ()) -> None:
        level: list[_Node] = []
        values = list(items)
        for start in range(0, len(values), WIDTH):
            part = values[start : start + WIDTH]
            level.append(_Node(len(part), (*part, *_EMPTY_LEAF[len(part) :])))
        height = 0
        while len(level) > 1:
            parts = [level[start : start + WIDTH] for start in range(0, len(level), WIDTH)]
            level = [_Node(sum(n.count for n in part), (*part, *_EMPTY_INNER[len(part) :])) for part in parts]
            height += 1
        self._root: _Node | None = level[0] if level else None
        self._height = height
        self._base = 0
        self._dense = True

    # ------------------------------------------------------------------ reading
    def __len__(self) -> int:
        return self._root.count if self._root is not None else 0

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self._get(index)

    def _get(self, index: int) -> T:
        length = len(self)
        if index < 0:
            index += length
        if not 0 <= index < length:
            raise IndexError("index out of range")
        node = self._root
        assert node is not None
        if self._dense:
            for shift in range(BITS * self._height, 0, -BITS):
                node = node.items[index >> shift & WIDTH - 1]
            found: T = node.items[index & WIDTH - 1]
            return found
        for _ in range(self._height):
            for child in node.items:
                if child is not None:
                    if index < child.count:
                        node = child
                        break
                    index -= child.count
        present: list[T] = [x for x in node.items if x is not ABSENT]
        return present[index]

    def __iter__(self) -> Iterator[T]:
        for leaf in _leaves(self._root, self._height):
            if leaf.count == WIDTH:
                yield from leaf.items
            else:
                yield from (x for x in leaf.items if x is not ABSENT)

    def __reversed__(self) -> Iterator[T]:
        for leaf in _leaves(self._root, self._height, -1):
            yield from (x for x in leaf.items[::-1] if x is not ABSENT)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, (SharedSequence, tuple, list)):
            return NotImplemented
        if len(self) != len(other):
            return False
        if isinstance(other, SharedSequence) and self._has_shape_of(other) and next(self._differences(other), None) is None:
            return True
        return all(a is b or a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"SharedSequence({list(self)!r})"

    # ------------------------------------------------------------------ places
    @property
    def is_dense(self) -> bool:
        """Whether the elements stand at places 0, 1, ..., so that index and place are the same. Holds as long as elements are only replaced or appended."""
        return self._dense

    def at(self, place: int) -> T | Absent:
        """What stands at a place, ABSENT where nothing does."""
        offset = place - self._base
        node = self._root
        if node is None or not 0 <= offset < WIDTH << BITS * self._height:
            return ABSENT
        for shift in range(BITS * self._height, 0, -BITS):
            node = node.items[offset >> shift & WIDTH - 1]
            if node is None:
                return ABSENT
        found: T | Absent = node.items[offset & WIDTH - 1]
        return found

    def with_changes(self, changes: Mapping[int, T | Absent]) -> SharedSequence[T]:
        """A version with other elements at these places (ABSENT empties one); this one stays as it is. Itself when nothing changes.

        O(k log n) for k changes. The order of the elements is that of their places.
        """
        wanted = sorted((place, value) for place, value in changes.items() if self.at(place) is not value)
        if not wanted:
            return self
        made: SharedSequence[T] = SharedSequence.__new__(SharedSequence)
        root, base, height = self._root, self._base, self._height
        if root is None:
            base, height = wanted[0][0], 0
        dense = self._dense
        while wanted[0][0] < base:  # grow at the head: the old root becomes the last child
            height += 1
            base -= (WIDTH - 1) << BITS * height
            root = _Node(root.count, (*_EMPTY_INNER[1:], root)) if root is not None else None
        while wanted[-1][0] - base >= WIDTH << BITS * height:  # grow at the tail: it becomes the first
            height += 1
            root = _Node(root.count, (root, *_EMPTY_INNER[1:])) if root is not None else None
        length = len(self)
        for place, value in wanted if dense else ():
            if value is ABSENT or place > length:
                dense = False
            elif place == length:
                length += 1
        made._root = _changed(root, height, [(place - base, value) for place, value in wanted], 0, len(wanted))
        made._base, made._height = base, height
        made._dense = dense and base == 0
        return made

    def changes_since(self, older: SharedSequence[T]) -> list[tuple[int, T | Absent, T | Absent]]:
        """Where two versions of one sequence differ: (place, element in `older`, element here), ascending by place; elements are compared by value.

        O(k log n) for k changes; O(n) in the rare case that the tree has grown in between.
        """
        if self is older:
            return []
        if self._has_shape_of(older):
            return list(self._differences(older))
        before, after = dict(older.places()), dict(self.places())
        pairs = ((place, before.get(place, ABSENT), after.get(place, ABSENT)) for place in sorted({*before, *after}))
        return [(place, a, b) for place, a, b in pairs if a is not b and a != b]

    def places(self) -> Iterator[tuple[int, T]]:
        """(place, element) in order."""
        stack: list[tuple[_Node, int, int]] = [(self._root, self._height, self._base)] if self._root is not None else []
        while stack:
            node, height, base = stack.pop()
            if height == 0:
                yield from ((base + i, x) for i, x in enumerate(node.items) if x is not ABSENT)
            else:
                size = 1 << BITS * height
                stack.extend((child, height - 1, base + i * size) for i, child in reversed([*enumerate(node.items)]) if child is not None)

    def _has_shape_of(self, other: SharedSequence[Any]) -> bool:
        return self._base == other._base and self._height == other._height

    def _differences(self, older: SharedSequence[T]) -> Iterator[tuple[int, T | Absent, T | Absent]]:
        stack: list[tuple[_Node | None, _Node | None, int, int]] = [(older._root, self._root, self._height, self._base)]
        while stack:
            old, new, height, base = stack.pop()
            if old is new:
                continue
            none = _EMPTY_INNER if height else _EMPTY_LEAF
            pairs = zip(old.items if old is not None else none, new.items if new is not None else none, strict=True)
            if height == 0:
                yield from ((base + i, a, b) for i, (a, b) in enumerate(pairs) if a is not b and a != b)
            else:
                size = 1 << BITS * height
                stack.extend([(a, b, height - 1, base + i * size) for i, (a, b) in enumerate(pairs) if a is not b][::-1])


def _changed(node: _Node | None, height: int, wanted: list[tuple[int, Any]], start: int, end: int) -> _Node | None:
    """`node` with wanted[start:end] put in, offsets counted modulo the node's size; None when nothing is left in it."""
    if height == 0:
        slots = list(node.items if node is not None else _EMPTY_LEAF)
        count = node.count if node is not None else 0
        for offset, value in wanted[start:end]:
            index = offset & WIDTH - 1
            count += (value is not ABSENT) - (slots[index] is not ABSENT)
            slots[index] = value
        return _Node(count, tuple(slots)) if count else None
    children = list(node.items if node is not None else _EMPTY_INNER)
    count = node.count if node is not None else 0
    shift = BITS * height
    while start < end:
        first = wanted[start][0] >> shift
        stop = start + 1
        while stop < end and wanted[stop][0] >> shift == first:
            stop += 1
        index = first & WIDTH - 1
        old = children[index]
        new = children[index] = _changed(old, height - 1, wanted, start, stop)
        count += (new.count if new is not None else 0) - (old.count if old is not None else 0)
        start = stop
    return _Node(count, tuple(children)) if count else None


def _leaves(node: _Node | None, height: int, step: int = 1) -> Iterator[_Node]:
    level = [node] if node is not None else []
    for _ in range(height):
        level = [child for parent in level for child in parent.items if child is not None]
    return iter(level[::step])


class SequenceEditor(Generic[K, T]):
    """Makes version after version of a `SharedSequence` whose elements are known by a key, each key once. `sequence` is the present version."""

    def __init__(self, items: Iterable[tuple[K, T]] = ()) -> None:
        pairs = list(items)
        self._place_of: dict[K, int] = {key: place for place, (key, _) in enumerate(pairs)}
        self._first = 0
        self._next = len(pairs)
        self.sequence: SharedSequence[T] = SharedSequence(value for _, value in pairs)

    def __contains__(self, key: object) -> bool:
        return key in self._place_of

    def apply(
        self, out: Iterable[K] = (), head: Sequence[tuple[K, T]] = (), tail: Sequence[tuple[K, T]] = (), replaced: Iterable[tuple[K, T]] = ()
    ) -> SharedSequence[T]:
        """Take keys out, put elements in front (the first of `head` becomes the first of all) and behind, and replace some where they stand.

        Mutates this editor only; returns the new `sequence`. Raises KeyError for a key that is not there, ValueError for one that comes in twice.
        """
        changes: dict[int, T | Absent] = {}
        for key in out:
            changes[self._place_of.pop(key)] = ABSENT
        for key, value in replaced:
            changes[self._place_of[key]] = value
        place = self._first = self._first - len(head)
        for key, value in head:
            self._put(key, place)
            changes[place] = value
            place += 1
        for key, value in tail:
            self._put(key, self._next)
            changes[self._next] = value
            self._next += 1
        self.sequence = self.sequence.with_changes(changes)
        return self.sequence

    def _put(self, key: K, place: int) -> None:
        if key in self._place_of:
            raise ValueError(f"{key!r} stands in the sequence already")
        self._place_of[key] = place
