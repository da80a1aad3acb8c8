"""Which token's key and value lie in which physical slot, and which recurrent state in which block: a fold over the events.

The ledger never looks at a tensor: it follows what the worker reports having written. It forgets a block's content when nothing can reach it any
more (the block was handed out again, was freed without a hash, or lost its hash while nobody used it), which is when a picture must stop showing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.trace.events import (
    BlockEvicted,
    BlocksAllocated,
    BlocksCopied,
    BlocksFreed,
    BlocksSkipped,
    BlocksSwappedIn,
    BlocksSwappedOut,
    BlocksTouched,
    CopyQueued,
    Event,
    KVWritten,
    PrefixCacheReset,
    StateWritten,
)

Slots = tuple[int | None, ...]


class SlotLedger:
    """Per block: the token id of each slot (`content`), or after how many tokens the recurrent state in it was taken (`num_state_tokens`).

    A block has as many slots as the block size of the KV-cache group that took it last, none if that group keeps recurrent states, and `block_size`
    before any took it. `group_block_sizes`: slots per block of each group, 0 for recurrent states; empty: one group of `block_size`.
    `cpu_content`: the same for the `num_cpu_blocks` blocks of a swap space. `content` tuples are replaced, never mutated, so frames can share them.
    """

    def __init__(self, num_blocks: int, block_size: int, group_block_sizes: Sequence[int] = (), num_cpu_blocks: int = 0) -> None:
        self.block_size = block_size
        self.group_block_sizes = tuple(group_block_sizes) or (block_size,)
        self._empty: dict[int, Slots] = {size: (None,) * size for size in (block_size, *self.group_block_sizes)}
        self.content: list[Slots] = [self._empty[block_size]] * num_blocks
        self.cpu_content: list[Slots] = [self._empty[block_size]] * num_cpu_blocks
        self.num_state_tokens: dict[int, int] = {}
        self._in_use: set[int] = set()

    def apply(self, event: Event) -> None:
        """Follow one event. Mutates `content` and `num_state_tokens`; events that move no keys, values or states do nothing."""
        if isinstance(event, KVWritten):
            self._write(event.slots, event.token_ids, self._size(event.group_id))
        elif isinstance(event, BlocksAllocated):
            self._take(event.block_ids, event.group_id)
        elif isinstance(event, BlocksTouched):
            self._in_use.update(event.block_ids)
        elif isinstance(event, (BlocksFreed, BlocksSkipped)):
            self._clear(event.prepended)
            self._in_use.difference_update(event.prepended, event.appended)
        elif isinstance(event, BlockEvicted):
            if event.block_id not in self._in_use:
                self._clear([event.block_id])
        elif isinstance(event, CopyQueued):
            self._take([event.destination_block_id], event.group_id)
        elif isinstance(event, StateWritten):
            self.num_state_tokens[event.block_id] = event.num_tokens
        elif isinstance(event, BlocksCopied):
            self._copy(event.source_block_ids, event.destination_block_ids)
        elif isinstance(event, BlocksSwappedOut):
            for gpu_block_id, cpu_block_id in zip(event.gpu_block_ids, event.cpu_block_ids, strict=True):
                self.cpu_content[cpu_block_id] = self.content[gpu_block_id]
            self._clear(event.prepended)
            self._in_use.difference_update(event.prepended)
        elif isinstance(event, BlocksSwappedIn):
            self._take(event.gpu_block_ids, event.group_id)
            for cpu_block_id, gpu_block_id in zip(event.cpu_block_ids, event.gpu_block_ids, strict=True):
                self.content[gpu_block_id] = self.cpu_content[cpu_block_id]
            self._clear_cpu(event.cpu_block_ids)
        elif isinstance(event, PrefixCacheReset) and event.ok:
            self._clear(range(len(self.content)))

    def block_size_of(self, event: KVWritten) -> int:
        """Tokens per block of the group that the event's slots belong to."""
        return self._size(event.group_id)

    def _size(self, group_id: int | None) -> int:
        return self.block_size if group_id is None else self.group_block_sizes[group_id]

    def _take(self, block_ids: Sequence[int], group_id: int | None) -> None:
        empty = self._empty[self._size(group_id)]
        self._in_use.update(block_ids)
        for block_id in block_ids:
            self.content[block_id] = empty
            self.num_state_tokens.pop(block_id, None)

    def _write(self, slots: list[int], token_ids: list[int], block_size: int) -> None:
        changed: dict[int, list[int | None]] = {}
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot < 0:
                continue  # the token belongs to another rank (R8.4)
            block_id, offset = divmod(slot, block_size)
            content = changed.get(block_id)
            if content is None:
                content = changed[block_id] = list(self.content[block_id])
            content[offset] = token_id
        for block_id, content in changed.items():
            self.content[block_id] = tuple(content)

    def _copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pages = [(self.content[source], self.num_state_tokens.get(source)) for source in sources]
        for destination, (slots, num_state_tokens) in zip(destinations, pages, strict=True):
            self.content[destination] = slots
            if num_state_tokens is None:
                self.num_state_tokens.pop(destination, None)
            else:
                self.num_state_tokens[destination] = num_state_tokens

    def _clear_cpu(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.cpu_content[block_id] = self._empty[self.block_size]

    def _clear(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.content[block_id] = self._empty[len(self.content[block_id])]
            self.num_state_tokens.pop(block_id, None)
