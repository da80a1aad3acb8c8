"""The block pool against a model so dumb that it can be checked by eye: plain lists, no links, no counters (R1.1-R1.15)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_hash import make_block_hash_with_group_id
from engine.core.block_pool import BlockPool
from engine.errors import EngineError
from engine.trace.events import BlockEvicted, Event
from tests.property.block_books import check_pool, keys_of

LABELS = [b"p", b"q", b"r", b"s"]


class BlockPoolMachine(RuleBasedStateMachine):
    """`queue`: free ids, head first. `refs`: count per id. `keys`: labels per hashed id, primary first. `entries`: label -> ids in order of registration,
    labels in order of the map (R1.10)."""

    @initialize(num_blocks=st.integers(2, 8), enable_caching=st.booleans(), recording=st.booleans())
    def build(self, num_blocks: int, enable_caching: bool, recording: bool) -> None:
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(num_blocks, enable_caching, 4, emit=self.record if recording else None)
        self.recording = recording
        self.caching = enable_caching
        self.queue = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.keys: dict[int, list[bytes]] = {}
        self.entries: dict[bytes, list[int]] = {}

    def record(self, event: Event) -> None:
        if isinstance(event, BlockEvicted):
            self.evicted.append((event.block_id, bytes.fromhex(event.block_hash)))
        self.check_books()  # every invariant holds whenever something is reported

    def unhash(self, block_id: int) -> list[tuple[int, bytes]]:
        """All keys go, the primary one last; returns what a recorder hears."""
        labels = self.keys.pop(block_id, [])
        for label in labels[1:] + labels[:1] if self.recording else labels:
            ids = self.entries.pop(label)
            ids.remove(block_id)
            if ids:
                self.entries[label] = ids  # behind the others
        return [(block_id, label) for label in labels[1:] + labels[:1]]

    @property
    def used(self) -> list[int]:
        return [block_id for block_id, count in self.refs.items() if count]

    @rule(n=st.integers(0, 9))
    def get(self, n: int) -> None:
        if n > len(self.queue):
            with pytest.raises(ValueError, match="cannot get"):
                self.pool.get_new_blocks(n)
            return
        self.evicted.clear()
        expected = self.queue[:n]
        taken = self.pool.get_new_blocks(n, "X")
        assert [block.block_id for block in taken] == expected
        heard = [what for block_id in expected for what in self.unhash(block_id)]
        if self.recording:
            assert self.evicted == heard
        del self.queue[:n]
        for block_id in expected:
            self.refs[block_id] = 1

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=4))
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])
        for block_id in block_ids:
            if not self.refs[block_id]:
                self.queue.remove(block_id)
            self.refs[block_id] += 1

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = [block_id for block_id, count in self.refs.items() for _ in range(count)]
        block_ids = data.draw(st.permutations(held))[: data.draw(st.integers(1, len(held)))]
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in block_ids)
        head: list[int] = []
        for block_id in block_ids:
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                if self.caching and block_id not in self.keys:
                    head.append(block_id)
                else:
                    self.queue.append(block_id)
        self.queue[:0] = head

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        """S25: refused, and what stood before it in the list is put back."""
        victim = data.draw(st.sampled_from(self.queue))
        block_ids = [*self.used[:2], victim]
        with pytest.raises(EngineError, match=f"block {victim} is freed twice"):
            self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    @precondition(lambda self: self.caching and self.used)
    @rule(data=st.data(), label=st.sampled_from(LABELS))
    def register(self, data: st.DataObject, label: bytes) -> None:
        """The first key is the primary one, others are further ones (R1.12); a key that the block has changes nothing."""
        block_id = data.draw(st.sampled_from(self.used))
        self.pool.insert_block_hash(make_block_hash_with_group_id(label, 0), self.pool.blocks[block_id], 4)
        known = self.keys.setdefault(block_id, [])
        if label not in known:
            known.append(label)
            known[1:] = sorted(known[1:])
            self.entries.setdefault(label, []).append(block_id)

    @precondition(lambda self: self.keys and any(block_id not in self.keys for block_id in self.refs))
    @rule(data=st.data())
    def move_keys(self, data: st.DataObject) -> None:
        """The cache moves, the block stays (R6.5)."""
        source = data.draw(st.sampled_from(sorted(self.keys)))
        destination = data.draw(st.sampled_from([block_id for block_id in self.refs if block_id not in self.keys]))
        covered = self.pool.blocks[source].block_hash_num_tokens
        self.pool.move_block_hashes(self.pool.blocks[source], self.pool.blocks[destination])
        labels = self.keys[source]
        recording, self.recording = self.recording, False  # no key is evicted: all go at once, primary first
        self.unhash(source)
        self.recording = recording
        self.keys[destination] = labels
        for label in labels:
            self.entries.setdefault(label, []).append(destination)
        assert self.pool.blocks[destination].block_hash_num_tokens == covered
        assert self.pool.blocks[source].block_hash_num_tokens is None

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sets(st.sampled_from(sorted(self.refs)), max_size=3))
        for block_id in sorted(block_ids):  # one by one: the model is exact between two reports
            self.unhash(block_id)
            self.pool.evict_blocks([block_id])

    @rule()
    def reset(self) -> None:
        unused = not self.used
        assert self.pool.reset_prefix_cache() is unused
        if unused:
            self.keys.clear()
            self.entries.clear()

    @rule(label=st.sampled_from(LABELS))
    def lookup(self, label: bytes) -> None:
        found = self.pool.get_cached_block(label, [0])
        assert (found[0].block_id if found else None) == next(iter(self.entries.get(label, [])), None)

    @invariant()
    def equals_the_model(self) -> None:
        pool = self.pool
        assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == self.queue
        assert pool.get_num_free_blocks() == len(self.queue)
        assert {block.block_id: block.ref_cnt for block in pool.blocks[1:]} == self.refs
        assert {block.block_id: [key[:-4] for key in keys_of(pool, block)] for block in pool.blocks if block.block_hash} == self.keys
        assert [(key[:-4], ids) for key, ids in pool.cached_block_hash_to_block.items()] == list(self.entries.items())
        assert pool.get_usage() == pytest.approx(len(self.used) / len(self.refs))

    @invariant()
    def check_books(self) -> None:
        check_pool(self.pool)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(stateful_step_count=30)
