"""Where a recurrent state is read and where it is written in one step: the columns of a block-table row of a Mamba group. Needs no torch.

The worker and the run without a model follow the same plan, so that both say the same about states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import EngineError

NULL_BLOCK_ID = 0


class StateStep(NamedTuple):
    """The state after `num_tokens` tokens goes to `block_id`. It grows out of the state after `num_source_tokens` tokens in `source_block_id`, None at the
    start of a request: then it grows out of nothing."""

    source_block_id: int | None
    num_source_tokens: int
    block_id: int
    num_tokens: int


def state_column(num_tokens: int, block_size: int, mamba_cache_mode: str) -> int:
    """Column of the row whose block holds the state after `num_tokens` tokens (at least 1). `block_size`: of the Mamba group itself, in tokens (A45). Mode
    ``none`` has one state per request, in column 0. vLLM: preprocess_mamba and mamba_attn's block_idx_last_computed_token."""
    return 0 if mamba_cache_mode == "none" else (num_tokens - 1) // block_size


def state_steps(row: Sequence[int], block_size: int, mamba_cache_mode: str, start: int, end: int) -> list[StateStep]:
    """What computing the tokens start..end-1 of a request does to its states, in order. `row`: the block ids of its row in the group (R8.3: of the worker's
    row, which still names what the manager has given back).

    Modes ``align`` and ``none`` leave one state behind, after the last token; mode ``all`` also one at the end of each block that is filled on the way (R3.42,
    R3.43). Raises EngineError where the row has no block, or the null block, at a place that a state is read from or written to (A46).
    """
    ends = [*range((start // block_size + 1) * block_size, end, block_size), end] if mamba_cache_mode == "all" else [end]
    source_block_id = _block_at(row, state_column(start, block_size, mamba_cache_mode), start) if start else None
    steps: list[StateStep] = []
    num_source_tokens = start
    for num_tokens in ends:
        block_id = _block_at(row, state_column(num_tokens, block_size, mamba_cache_mode), num_tokens)
        steps.append(StateStep(source_block_id, num_source_tokens, block_id, num_tokens))
        source_block_id, num_source_tokens = block_id, num_tokens
    return steps


def _block_at(row: Sequence[int], column: int, num_tokens: int) -> int:
    block_id = row[column] if column < len(row) else None
    if block_id is None:
        raise EngineError(f"The state after {num_tokens} tokens belongs in column {column}, but the row has {len(row)} blocks: {list(row)}.")
    if block_id == NULL_BLOCK_ID:
        raise EngineError(f"The state after {num_tokens} tokens belongs in column {column}, but the row has the null block there: {list(row)}.")
    return block_id
