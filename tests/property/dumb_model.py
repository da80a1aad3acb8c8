"""A model that computes nothing and remembers what lies where: whatever reads a block that does not hold exactly what it should fails.

The key and value of a token depend on every token before it, so a slot holds the whole prefix that ends with its token, and a recurrent state the whole
prefix that it was taken after, each with what else tells prefixes apart (the salt) and with the group whose layers wrote it. Rows follow what the
scheduler sends, not what the manager's tables say (R8.3). Rows, copies, reads of states, writes, reads of keys: the order of R8.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, CrossAttentionSpec, KVCacheSpec, MambaSpec, RSWASpec, SlidingWindowSpec
from engine.core.request import Request
from tests.property.block_books import keys_of

Prefix: TypeAlias = tuple[str | None, tuple[int, ...]]
"""Salt and tokens."""


@dataclass
class Work:
    """One request's part of a step: tokens `start` to `end` (exclusive) of `tokens`, of which the first `num_prompt_tokens` are its prompt."""

    request_id: str
    salt: str | None
    tokens: Sequence[int]
    num_prompt_tokens: int
    start: int
    end: int

    def prefix(self, num_tokens: int) -> Prefix:
        assert num_tokens <= len(self.tokens), "a step computes a token that nobody knows yet"
        return (self.salt, tuple(self.tokens[:num_tokens]))


@dataclass
class DumbModel:
    """`specs` per group. `slots`: (block, offset) -> (group, prefix); `states`: block -> (group, prefix); a block has one or the other. `prefixes`: what each
    hash stands for."""

    specs: Sequence[KVCacheSpec]
    slots: dict[int, dict[int, tuple[int, Prefix]]] = field(default_factory=dict)
    states: dict[int, tuple[int, Prefix]] = field(default_factory=dict)
    rows: dict[str, list[list[int]]] = field(default_factory=dict)
    prefixes: dict[bytes, Prefix] = field(default_factory=dict)

    # ------------------------------------------------------------------ what the scheduler sends
    def set_row(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        self.rows[request_id] = [list(ids) for ids in block_ids]

    def extend_row(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        for row, ids in zip(self.rows[request_id], block_ids, strict=True):
            row.extend(ids)

    def follow(self, output: Any) -> None:
        """Rows as a SchedulerOutput says."""
        for request_id in output.finished_req_ids | output.preempted_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.set_row(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.set_row(request_id, block_ids)
            elif block_ids is not None:
                self.extend_row(request_id, block_ids)

    # ------------------------------------------------------------------ one step
    def run(self, batch: Sequence[Work], copies: Sequence[tuple[int, int]]) -> None:
        pages = [(self.slots.get(source), self.states.get(source)) for source, _ in copies]
        for (_, destination), (slots, state) in zip(copies, pages, strict=True):
            self.clear(destination)
            if slots is not None:
                self.slots[destination] = dict(slots)
            if state is not None:
                self.states[destination] = state
        for group_id, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                for work in batch:
                    self.read_state(work, group_id, spec)
                for work in batch:
                    self.write_states(work, group_id, spec)
            elif not isinstance(spec, CrossAttentionSpec):
                for work in batch:
                    self.write_keys(work, group_id, spec)
                for work in batch:
                    self.read_keys(work, group_id, spec)

    def clear(self, block_id: int) -> None:
        self.slots.pop(block_id, None)
        self.states.pop(block_id, None)

    def write_keys(self, work: Work, group_id: int, spec: KVCacheSpec) -> None:
        row = self.rows[work.request_id][group_id]
        for position in range(work.start, work.end):
            block_id, offset = row[position // spec.block_size], position % spec.block_size
            assert block_id, f"{work.request_id} writes position {position} of group {group_id} into the null block"
            self.states.pop(block_id, None)
            self.slots.setdefault(block_id, {})[offset] = (group_id, work.prefix(position + 1))

    def read_keys(self, work: Work, group_id: int, spec: KVCacheSpec) -> None:
        row = self.rows[work.request_id][group_id]
        for position in needed_positions(spec, work):
            block_id, offset = row[position // spec.block_size], position % spec.block_size
            found = self.slots.get(block_id, {}).get(offset) if block_id else None
            expected = (group_id, work.prefix(position + 1))
            assert found == expected, f"{work.request_id} reads position {position} of group {group_id} in block {block_id}: {found} is not {expected}"

    @staticmethod
    def state_index(spec: MambaSpec, num_tokens: int) -> int:
        return 0 if spec.mamba_cache_mode == "none" else -(-num_tokens // spec.block_size) - 1

    def read_state(self, work: Work, group_id: int, spec: MambaSpec) -> None:
        if work.start == 0:
            return
        block_id = self.rows[work.request_id][group_id][self.state_index(spec, work.start)]
        found, expected = self.states.get(block_id) if block_id else None, (group_id, work.prefix(work.start))
        assert found == expected, f"{work.request_id} goes on from the state in block {block_id} of group {group_id}: {found} is not {expected}"

    def write_states(self, work: Work, group_id: int, spec: MambaSpec) -> None:
        row, size = self.rows[work.request_id][group_id], spec.block_size
        inner = range((work.start // size + 1) * size, work.end, size) if spec.mamba_cache_mode == "all" else ()
        for num_tokens in (*inner, work.end):
            block_id = row[self.state_index(spec, num_tokens)]
            assert block_id, f"{work.request_id} writes the state after {num_tokens} tokens of group {group_id} into the null block"
            self.slots.pop(block_id, None)
            self.states[block_id] = (group_id, work.prefix(num_tokens))

    # ------------------------------------------------------------------ the prefix cache
    def check_hit(self, request: Request, blocks: Iterable[Sequence[Any]], num_tokens: int) -> None:
        """Whoever adopts these blocks for its first `num_tokens` tokens finds in them all that the next token reads."""
        work = Work("(hit)", request.cache_salt, request.all_token_ids, request.num_prompt_tokens, num_tokens, num_tokens)
        self.set_row(work.request_id, [[0 if block.is_null else block.block_id for block in group] for group in blocks])
        for group_id, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                self.read_state(work, group_id, spec)
            elif not isinstance(spec, CrossAttentionSpec):
                self.read_keys(work, group_id, spec)
        del self.rows[work.request_id]

    def learn(self, request: Request, hash_block_size: int) -> None:
        """What the request's hashes stand for; one hash never stands for two prefixes."""
        for index, block_hash in enumerate(request.block_hashes):
            prefix = (request.cache_salt, tuple(request.all_token_ids[: (index + 1) * hash_block_size]))
            assert self.prefixes.setdefault(block_hash, prefix) == prefix

    def check_cache(self, manager: KVCacheManager) -> None:
        """Every key of every block says the truth about what lies in it; call it when no step is on its way."""
        pool = manager.block_pool
        sizes = [group.block_size for group in manager.coordinator.single_type_managers]
        for block in pool.blocks:
            for key in keys_of(pool, block):
                salt, tokens = self.prefixes[key[:-4]]
                group_id = int.from_bytes(key[-4:], "big")
                where = f"block {block.block_id} is cached for {tokens} of group {group_id}"
                if isinstance(self.specs[group_id], MambaSpec):
                    assert self.states.get(block.block_id) == (group_id, (salt, tokens)), f"{where} but has {self.states.get(block.block_id)}"
                    continue
                size = sizes[group_id]
                for position in range((len(tokens) - 1) // size * size, len(tokens)):
                    found = self.slots.get(block.block_id, {}).get(position % size)
                    assert found == (group_id, (salt, tokens[: position + 1])), f"{where} but has {found} for position {position}"


def needed_positions(spec: KVCacheSpec, work: Work) -> Iterable[int]:
    """Positions that the attention of these tokens reads (R3.1, R3.50): the tokens themselves, and what their type lets them see before them."""
    start = work.start
    first = 0
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, start - spec.sliding_window + 1)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        first = start // spec.attention_chunk_size * spec.attention_chunk_size
    elif isinstance(spec, RSWASpec):
        prompt = range(min(work.num_prompt_tokens, work.end))
        return [*prompt, *range(max(len(prompt), start - spec.rswa_window + 1), work.end)]
    return range(first, work.end)


def batch_of(scheduled: Mapping[str, int], start: Mapping[str, int], requests: Mapping[str, Request], tokens: Mapping[str, Sequence[int]]) -> list[Work]:
    """The step's work, request by request. `tokens`: prompt and all outputs, also those that nobody was told yet."""
    return [Work(r, requests[r].cache_salt, tokens[r], requests[r].num_prompt_tokens, start[r], start[r] + num_tokens) for r, num_tokens in scheduled.items()]
