"""What the pool shows as a whole, kept as `SharedSequence`s: the free queue, the prefix cache, and who owns which block.

Each mirror is told what an event touched and then reads only there; what it reads is the engine's own state, never the event's account of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from engine.core.block_hash import BlockHashWithGroupId, format_key, make_block_hash_with_group_id
from engine.core.block_hash_map import BlockHashToBlockMap
from engine.core.free_queue import FreeKVCacheBlockQueue
from engine.core.kv_cache_block import KVCacheBlock
from engine.trace.frame import BlockOwner
from engine.trace.shared_sequence import SequenceEditor, SharedSequence

MapEntry = tuple[str, tuple[int, ...]]


class FreeQueueMirror:
    """The free queue's block ids, head first."""

    def __init__(self, queue: FreeKVCacheBlockQueue) -> None:
        """Reads the whole queue."""
        self._editor: SequenceEditor[int, int] = SequenceEditor((b.block_id, b.block_id) for b in queue.get_all_free_blocks())

    @property
    def sequence(self) -> SharedSequence[int]:
        """As it was read last."""
        return self._editor.sequence

    def update(self, queue: FreeKVCacheBlockQueue, touched: Iterable[KVCacheBlock]) -> None:
        """Read again what may have left, or joined at either end. Blocks that are not in `touched` stand where they stood. O(touched · log queue)."""
        blocks = {block.block_id: block for block in touched}
        out = [block_id for block_id in blocks if block_id in self._editor]
        head: list[int] = []
        node = queue.fake_free_list_head.next_free_block
        while node is not None and node.block_id in blocks:
            head.append(node.block_id)
            node = node.next_free_block
        tail: list[int] = []
        if node is not queue.fake_free_list_tail:  # else all that is left was read from the head
            node = queue.fake_free_list_tail.prev_free_block
            while node is not None and node.block_id in blocks:
                tail.append(node.block_id)
                node = node.prev_free_block
        self._editor.apply(out, [(i, i) for i in head], [(i, i) for i in reversed(tail)])


class HashMapMirror:
    """The prefix cache in order of insertion: key -> block ids."""

    def __init__(self, hash_map: BlockHashToBlockMap) -> None:
        """Reads the whole map."""
        items = [(key, tuple(ids)) for key, ids in hash_map.items()]
        self._editor: SequenceEditor[BlockHashWithGroupId, MapEntry] = SequenceEditor((key, (format_key(key), ids)) for key, ids in items)
        self._ids = dict(items)

    @property
    def sequence(self) -> SharedSequence[MapEntry]:
        """As it was read last."""
        return self._editor.sequence

    def update(self, hash_map: BlockHashToBlockMap, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Read these keys again. The others are as they were and in the same order; what is new or was put in again stands at the end (R1.10)."""
        now = {key: tuple(hash_map.block_ids(key)) for key in keys}
        out = [key for key, ids in now.items() if not ids and key in self._ids]
        changed = {key for key, ids in now.items() if ids and self._ids.get(key) != ids}
        newest: list[BlockHashWithGroupId] = []
        if changed:
            for key in hash_map.newest_keys():
                if key not in changed:
                    break
                newest.append(key)
            newest.reverse()
        put_in_again = [key for key in newest if key in self._ids]
        replaced = changed.difference(newest)
        self._editor.apply(
            [*out, *put_in_again],
            tail=[(key, (format_key(key), now[key])) for key in newest],
            replaced=[(key, (format_key(key), now[key])) for key in sorted(replaced)],
        )
        for key in out:
            del self._ids[key]
        for key in changed:
            self._ids[key] = now[key]


class OwnersMirror:
    """Who has which block in which table, with the tables themselves: per request, per KV-cache group.

    `arrival`: number of each request in order of arrival; the caller adds new ones.
    """

    def __init__(self, num_groups: int, null_block_id: int, arrival: Mapping[str, int]) -> None:
        self._num_groups = num_groups
        self._null_block_id = null_block_id
        self._arrival = arrival
        self._tables: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._owners: dict[int, tuple[BlockOwner, ...]] = {}

    def tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """The request's block tables as they were read last."""
        return self._tables.get(request_id, ((),) * self._num_groups)

    def owners(self, block_id: int) -> tuple[BlockOwner, ...]:
        """By group, then by arrival of the request, then by logical index."""
        return self._owners.get(block_id, ())

    def update(self, request_id: str, group_id: int, table: Sequence[KVCacheBlock], num_appended: int | None = None) -> set[int]:
        """Read one table again; returns the blocks whose owners changed. With `num_appended` only so many entries at the end are new."""
        tables = self.tables(request_id)
        old = tables[group_id]
        if num_appended is not None and len(old) + num_appended == len(table):
            new = (*old, *(block.block_id for block in table[len(old) :]))
            indices: Collection[int] = range(len(old), len(new))
        else:
            new = tuple([block.block_id for block in table])
            indices = [i for i in range(max(len(old), len(new))) if old[i : i + 1] != new[i : i + 1]]
        if not indices:
            return set()
        self._tables[request_id] = (*tables[:group_id], new, *tables[group_id + 1 :])
        changed: set[int] = set()
        for index in indices:
            owner = BlockOwner(request_id, group_id, index)
            if index < len(old) and old[index] != self._null_block_id:
                changed.add(old[index])
                self._drop(old[index], owner)
            if index < len(new) and new[index] != self._null_block_id:
                changed.add(new[index])
                self._add(new[index], owner)
        return changed

    def _add(self, block_id: int, owner: BlockOwner) -> None:
        owners = self._owners.get(block_id)
        self._owners[block_id] = (owner,) if owners is None else tuple(sorted((*owners, owner), key=self._order))

    def _drop(self, block_id: int, owner: BlockOwner) -> None:
        owners = tuple(o for o in self._owners[block_id] if o != owner)
        if owners:
            self._owners[block_id] = owners
        else:
            del self._owners[block_id]

    def _order(self, owner: BlockOwner) -> tuple[int, int, int]:
        return owner.group_id, self._arrival[owner.request_id], owner.logical_index


def parse_key(text: str) -> BlockHashWithGroupId:
    """The cache key that `format_key` shows as `text`."""
    digest, _, group_id = text.rpartition(":")
    return make_block_hash_with_group_id(bytes.fromhex(digest), int(group_id))
