"""The contiguous allocator of the systems that the paper compares with: chunks of slots, halved and joined again as buddies."""

from __future__ import annotations

from engine.errors import EngineError, InvalidInput


class BuddyAllocator:
    """Hands out contiguous chunks of a line of `num_slots` slots. Every chunk has a power of two of slots and starts at a multiple of its size.

    A line that is no power of two long is cut into root chunks, the largest first: 15,728 slots are 8192 + 4096 + 2048 + 1024 + 256 + 64 + 32 + 16. Root chunks
    are halved like all others, but never joined with one another. Of the chunks that would do, the smallest is taken, and of those the one with the lowest
    start.

    What a chunk has beyond the requested size is not kept apart here: whoever asks knows what was asked for (the paper counts it as external fragmentation).
    Source: Knuth, The Art of Computer Programming 1, section 2.5, the buddy system; the paper's section 6.1 assumes it for Orca.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises InvalidInput for fewer than 1 slot."""
        if num_slots < 1:
            raise InvalidInput(f"num_slots is {num_slots}, but an allocator needs at least 1 slot: give it more memory")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        self._order_of: dict[int, int] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @staticmethod
    def chunk_size(size: int) -> int:
        """The slots that a chunk for `size` slots has: the next power of two. Raises InvalidInput for a size below 1."""
        if size < 1:
            raise InvalidInput(f"size is {size}, but a chunk has at least 1 slot")
        return 1 << (size - 1).bit_length()

    @property
    def largest_chunk(self) -> int:
        """Slots of the largest chunk that this line can ever hold: its largest root chunk."""
        return 1 << (self.num_slots.bit_length() - 1)

    def allocate(self, size: int) -> int | None:
        """The start of a chunk for `size` slots, or None where no free chunk is large enough (then nothing changes). Raises InvalidInput for a size below 1."""
        wanted = self.chunk_size(size).bit_length() - 1
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:  # keep the lower half, give the upper one back
            order -= 1
            self._free[order].add(start + (1 << order))
        self._order_of[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def free(self, start: int) -> None:
        """Give the chunk at `start` back; it is joined with its buddy as long as that is free, too. Raises EngineError where no chunk starts there."""
        order = self._order_of.pop(start, None)
        if order is None:
            raise EngineError(f"the chunk at slot {start} is freed, but no chunk that is in use starts there")
        self.num_free += 1 << order
        while start ^ 1 << order in self._free[order]:
            self._free[order].remove(start ^ 1 << order)
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def chunks(self) -> list[tuple[int, int]]:
        """(start, slots) of every chunk in use, by start."""
        return sorted((start, 1 << order) for start, order in self._order_of.items())

    def free_chunks(self) -> list[tuple[int, int]]:
        """(start, slots) of every free chunk, by start. Neighbours that are no buddies stay apart."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)
