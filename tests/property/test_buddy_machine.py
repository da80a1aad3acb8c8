"""The buddy allocator against one flag per slot (Knuth's buddy system: Algorithms R and S, on any number of slots)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import EngineError, InvalidInput
from engine.paper.buddy_allocator import BuddyAllocator
from tests.property.dumb_buddy import DumbBuddy


class BuddyMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 100))
    def build(self, num_slots: int) -> None:
        self.real = BuddyAllocator(num_slots)
        self.dumb = DumbBuddy(num_slots)

    @rule(size=st.one_of(st.integers(1, 12), st.integers(1, 130)))
    def allocate(self, size: int) -> None:
        assert self.real.allocate(size) == self.dumb.allocate(size)

    @precondition(lambda self: self.dumb.chunks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.dumb.chunks)))
        self.real.free(start)
        self.dumb.free(start)

    @rule(start=st.integers(-2, 101))
    def free_what_starts_nowhere(self, start: int) -> None:
        if start not in self.dumb.chunks:
            with pytest.raises(EngineError, match="no chunk that is in use starts there"):
                self.real.free(start)

    @rule(size=st.integers(-3, 0))
    def allocate_nothing(self, size: int) -> None:
        with pytest.raises(InvalidInput, match="at least 1 slot"):
            self.real.allocate(size)

    @invariant()
    def equals_the_dumb_one(self) -> None:
        assert self.real.chunks() == sorted(self.dumb.chunks.items())
        assert self.real.free_chunks() == self.dumb.free_chunks()
        assert self.real.num_free == self.dumb.used.count(False)
        assert self.real.largest_chunk == self.dumb.roots()[0][1]

    @invariant()
    def chunks_are_aligned_and_tile_the_line(self) -> None:
        end = 0
        for start, size in sorted(self.real.chunks() + self.real.free_chunks()):
            assert start == end
            assert size & (size - 1) == 0
            assert start % size == 0
            end = start + size
        assert end == self.real.num_slots


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
