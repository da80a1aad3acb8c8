"""Which token's key and value lie in which physical slot: a fold over the events.

The ledger never looks at a tensor: it follows what the worker reports having written. It forgets a block's content when nothing can reach it any
more (the block lost its hash, was handed out again, or was freed without a hash), which is when a picture must stop showing it.
"""

from __future__ import annotations

from engine.trace.events import BlockEvicted, BlocksAllocated, BlocksCopied, BlocksFreed, Event, KVWritten, PrefixCacheReset

Slots = tuple[int | None, ...]


class SlotLedger:
    """Token id per slot, per block; `content` tuples are replaced, never mutated, so frames can share them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.empty: Slots = (None,) * block_size
        self.content: list[Slots] = [self.empty] * num_blocks

    def apply(self, event: Event) -> None:
        """Follow one event. Mutates `content`; events that move no keys and values do nothing."""
        if isinstance(event, KVWritten):
            self._write(event.slots, event.token_ids)
        elif isinstance(event, BlocksAllocated):
            self._clear(event.block_ids)
        elif isinstance(event, BlocksFreed):
            self._clear(event.prepended)
        elif isinstance(event, BlockEvicted):
            self._clear([event.block_id])
        elif isinstance(event, BlocksCopied):
            sources = [self.content[block_id] for block_id in event.source_block_ids]
            for destination, slots in zip(event.destination_block_ids, sources, strict=True):
                self.content[destination] = slots
        elif isinstance(event, PrefixCacheReset) and event.ok:
            self._clear(range(len(self.content)))

    def _write(self, slots: list[int], token_ids: list[int]) -> None:
        changed: dict[int, list[int | None]] = {}
        for slot, token_id in zip(slots, token_ids, strict=True):
            block_id, offset = divmod(slot, self.block_size)
            changed.setdefault(block_id, list(self.content[block_id]))[offset] = token_id
        for block_id, content in changed.items():
            self.content[block_id] = tuple(content)

    def _clear(self, block_ids: list[int] | range) -> None:
        for block_id in block_ids:
            self.content[block_id] = self.empty
