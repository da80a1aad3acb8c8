"""The prefix cache as what it is, chains of hashes: each hash once, with the blocks that it stands for in each group."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.trace.frame import Frame, TraceHeader
from views.narration.groups import groups_of, hash_block_size_of


class _Place(NamedTuple):
    """Where a hash stands in a request's chain: after `number` hash units."""

    request_id: str
    chain: tuple[str, ...]
    number: int


class Chains:
    """Distinct states of the prefix cache in order of first use: `tables` holds lists of nodes, `index` says which one a frame shows."""

    def __init__(self, header: TraceHeader) -> None:
        self.tables: list[list[dict[str, Any]]] = []
        self._unit = hash_block_size_of(header)
        groups = groups_of(header)
        self._sizes = [max(group.block_size // self._unit, 1) for group in groups]
        self._states = {group.group_id for group in groups if group.is_state}
        self._last = -1

    def index(self, frame: Frame, previous: Frame | None) -> int:
        """The table of this frame; the one of the frame before if neither the cache nor any request's hashes changed."""
        if self._last < 0 or previous is None or not _same(frame, previous):
            nodes = self._nodes(frame)
            if self._last < 0 or nodes != self.tables[self._last]:
                self.tables.append(nodes)
                self._last = len(self.tables) - 1
        return self._last

    def _nodes(self, frame: Frame) -> list[dict[str, Any]]:
        """`hash`; `groups`: [group id, block ids] pairs; `parent`: the hash it hangs on, registered or not; `lost`: that parent is gone; `known`: a request
        still knows the chain; `tokens`: [request, first, end], the tokens that its block, or its part of it, holds."""
        registered: dict[str, dict[int, list[int]]] = {}
        for key, block_ids in frame.hash_map:
            digest, _, group = key.rpartition(":")
            registered.setdefault(digest or key, {})[int(group) if group.isdigit() else 0] = list(block_ids)
        places: dict[str, _Place] = {}
        for request in frame.requests:
            for number, digest in enumerate(request.block_hashes, 1):
                places.setdefault(digest, _Place(request.request_id, request.block_hashes, number))
        return [self._node(digest, held, places.get(digest), registered) for digest, held in registered.items()]

    def _node(self, digest: str, held: dict[int, list[int]], place: _Place | None, registered: dict[str, dict[int, list[int]]]) -> dict[str, Any]:
        node: dict[str, Any] = {"hash": digest, "groups": [[group, ids] for group, ids in held.items()], "parent": None, "lost": False, "known": False}
        if place is None:
            return {**node, "tokens": None}
        before = next((n for n in range(place.number - 1, 0, -1) if place.chain[n - 1] in registered), 0)
        if self._states.issuperset(held):  # a state stands for everything before it, so nothing between can be missing
            tokens = [place.request_id, before * self._unit, place.number * self._unit]
            return {**node, "known": True, "tokens": tokens, "parent": place.chain[before - 1] if before else None}
        starts = {group: self._start(group, place.number) for group in held if group not in self._states}
        first = max(starts.values())
        node["known"] = True
        node["tokens"] = [place.request_id, first * self._unit, place.number * self._unit]
        wanted = [place.chain[start - 1] if start else None for start in starts.values()]
        found = next((w for w, group in zip(wanted, starts, strict=True) if w is not None and group in registered.get(w, ())), None)
        if found is None and None not in wanted:
            node["lost"] = True
            found = place.chain[before - 1] if before else wanted[0]
        node["parent"] = found
        return node

    def _start(self, group: int, number: int) -> int:
        """Hash units before the group's block in which a prefix of `number` units ends."""
        size = self._sizes[group] if group < len(self._sizes) else 1
        return (number - 1) // size * size


def _same(frame: Frame, previous: Frame) -> bool:
    if frame.hash_map is not previous.hash_map and frame.hash_map != previous.hash_map:
        return False
    if len(frame.requests) != len(previous.requests):
        return False
    return all(a is b or a.block_hashes == b.block_hashes for a, b in zip(frame.requests, previous.requests, strict=True))
