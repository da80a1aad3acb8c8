"""A buddy allocator so dumb that it can be checked by eye: one flag per slot, and every question answered by looking at all of them."""

from __future__ import annotations


class DumbBuddy:
    """`used[s]`: slot s is part of a chunk that is in use. `chunks`: start -> size of those."""

    def __init__(self, num_slots: int) -> None:
        self.used = [False] * num_slots
        self.chunks: dict[int, int] = {}

    def roots(self) -> list[tuple[int, int]]:
        """(start, size): the largest power of two that fits into what is left, again and again."""
        roots, start = [], 0
        while start < len(self.used):
            size = 1
            while start + 2 * size <= len(self.used):
                size *= 2
            roots.append((start, size))
            start += size
        return roots

    def free_chunks(self) -> list[tuple[int, int]]:
        """A free stretch that is a root or half of something halved is one chunk if all of it is free; else its halves are looked at."""

        def look(start: int, size: int) -> list[tuple[int, int]]:
            if not any(self.used[start : start + size]):
                return [(start, size)]
            return look(start, size // 2) + look(start + size // 2, size // 2) if size > 1 else []

        return [chunk for start, size in self.roots() for chunk in look(start, size)]

    def allocate(self, size: int) -> int | None:
        wanted = 1
        while wanted < size:
            wanted *= 2
        candidates = [(chunk, start) for start, chunk in self.free_chunks() if chunk >= wanted]
        if not candidates:
            return None
        start = min(candidates)[1]
        self.chunks[start] = wanted
        self.used[start : start + wanted] = [True] * wanted
        return start

    def free(self, start: int) -> None:
        size = self.chunks.pop(start)
        self.used[start : start + size] = [False] * size
