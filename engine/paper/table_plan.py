"""Where the block tables of a group come from when it is admitted: what each sequence shares and what it takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.paper.sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class TablePlan:
    """One sequence's table at admission: the first `num_shared_blocks` blocks are those of `source`, whose first `num_shared_tokens` tokens they hold; then
    `num_new_blocks` follow. `copies_last_shared`: the last shared block is partial, so the sequence's first own token copies it."""

    sequence: Sequence
    source: Sequence | None
    num_shared_blocks: int
    num_shared_tokens: int
    num_new_blocks: int
    copies_last_shared: bool

    @property
    def num_required_blocks(self) -> int:
        """Blocks taken from the free queue."""
        return self.num_new_blocks + self.copies_last_shared


def plan_tables(group: SequenceGroup, block_size: int) -> list[TablePlan]:
    """How the living sequences of a waiting group get their tables, in order.

    The first starts as a fork of the provider's prefix, partial last block included, or with nothing. Further ones (a group that was preempted and is computed
    again) share, with that earlier one of their group with which they have most in common, the full blocks that hold the same tokens; at least their last token
    is left to compute, because its logits are wanted. Everything else is computed again into blocks of its own."""
    plans: list[TablePlan] = []
    for number, sequence in enumerate(group.living):
        source, num_tokens = group.prefix, group.num_prefix_tokens
        if number:
            best = max(group.living[:number], key=lambda earlier: num_common_tokens(earlier, sequence))
            source, num_tokens = best, min(num_common_tokens(best, sequence), sequence.num_tokens - 1) // block_size * block_size
        num_shared = -(-num_tokens // block_size)
        num_new = -(-sequence.num_tokens // block_size) - num_shared
        plans.append(TablePlan(sequence, source if num_shared else None, num_shared, num_tokens, num_new, num_tokens % block_size > 0))
    return plans


def num_common_tokens(one: Sequence, other: Sequence) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(one.token_ids, other.token_ids, strict=False):
        if a != b:
            break
        count += 1
    return count
