"""What is different between two neighbouring frames, so that only that is sent: blocks, the free queue, the prefix cache.

Frames of a recording share their sequences and know in which places two of them differ, so the work is in proportion to what changed; a frame made by hand
has tuples, which are compared element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.trace.frame import BlockState, Frame
from engine.trace.shared_sequence import ABSENT, SharedSequence


def changed_blocks(new: Sequence[BlockState], old: Sequence[BlockState]) -> list[BlockState]:
    """The blocks of a pool that are not as they were."""
    if isinstance(new, SharedSequence) and isinstance(old, SharedSequence) and new.is_dense and old.is_dense:
        return [block for _, _, block in new.changes_since(old) if isinstance(block, BlockState)]
    return [] if new is old else [b for b, before in zip(new, old, strict=True) if b is not before and b != before]


def queue_change(new: Sequence[int], old: Sequence[int]) -> dict[str, list[int]] | None:
    """How a free queue changed: `out` left it, `head` came in front (first of all first), `tail` behind. None if it did not."""
    if new is old:
        return None
    shared = isinstance(new, SharedSequence) and isinstance(old, SharedSequence)
    found = _shared_queue_change(new, old) if shared else _queue_change(list(new), list(old))
    return found if any(found.values()) else None


def _shared_queue_change(new: Any, old: Any) -> dict[str, list[int]]:
    """Blocks come in only before all others or behind them, so their places say which."""
    changes = new.changes_since(old)
    first = next((place for place, _ in old.places()), 0)
    came = [(place, after) for place, before, after in changes if after is not ABSENT]
    out = [before for _, before, _ in changes if before is not ABSENT]
    return {"out": out, "head": [b for place, b in came if place < first], "tail": [b for place, b in came if place >= first]}


def _queue_change(new: list[int], old: list[int]) -> dict[str, list[int]]:
    """The longest stretch of the old queue, without those that left, that stands in the new one; what is before and behind it came in."""
    for stayed in ([b for b in old if b in set(new)], []):
        size = len(stayed)
        for start in range(len(new) - size + 1):
            if new[start : start + size] == stayed:
                kept = set(stayed)
                return {"out": [b for b in old if b not in kept], "head": new[:start], "tail": new[start + size :]}
    return {"out": old, "head": [], "tail": new}


def cache_changes(frame: Frame, previous: Frame) -> list[list[Any]]:
    """[key, block ids] of every entry of the prefix cache that is new or different, in order of insertion, and [key, []] of those that are gone."""
    new, old = frame.hash_map, previous.hash_map
    if new is old:
        return []
    if isinstance(new, SharedSequence) and isinstance(old, SharedSequence):
        changes = new.changes_since(old)
        entries = [after for _, _, after in changes if isinstance(after, tuple)]
        gone = [before[0] for _, before, _ in changes if isinstance(before, tuple)]
    else:
        known = dict(old)
        entries = [entry for entry in new if known.get(entry[0]) != entry[1]]
        gone = [key for key in known if key not in dict(new)]
    stays = {key for key, _ in entries}
    return [*([key, []] for key in gone if key not in stays), *([key, list(ids)] for key, ids in entries)]


def whole_cache(hash_map: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[Any]]:
    """[key, block ids] of every entry, in order of insertion."""
    return [[key, list(ids)] for key, ids in hash_map]
