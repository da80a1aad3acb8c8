"""A batch too large to be looked at token by token: what of it a close-up shows."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.worker.layer_capture import LayerInputs
from kernels import reshape_and_cache

MAX_TOKENS = 256
"""Tokens of a batch that a close-up shows. Interpreted with a GPU's programs, each costs 2 milliseconds for its write, and each tile of 64 keys 4."""


def shown_part(inputs: LayerInputs, max_tokens: int = MAX_TOKENS) -> tuple[LayerInputs, int]:
    """The inputs themselves, or, of a batch of more than `max_tokens` tokens, the last tokens of each request's part, and how many tokens were left out.

    The keys and values of those lie in the returned caches, as if an earlier step had computed them; every request keeps one token at least. Leaves `inputs`
    as they are.
    """
    lengths = inputs.query_start_loc.diff().tolist()
    if sum(lengths) <= max_tokens:
        return inputs, 0
    most = next((most for most in range(max(lengths), 1, -1) if sum(min(length, most) for length in lengths) <= max_tokens), 1)
    ends = inputs.query_start_loc[1:].tolist()
    kept = [token for end, length in zip(ends, lengths, strict=True) for token in range(end - min(length, most), end)]
    left_out = sorted(set(range(sum(lengths))) - set(kept))
    key_cache, value_cache = inputs.key_cache.clone(), inputs.value_cache.clone()
    reshape_and_cache(inputs.key[left_out], inputs.value[left_out], key_cache, value_cache, inputs.slot_mapping[left_out], backend="torch")
    starts = torch.tensor([0, *(min(length, most) for length in lengths)]).cumsum(0).int()
    part = replace(
        inputs,
        query=inputs.query[kept],
        key=inputs.key[kept],
        value=inputs.value[kept],
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=inputs.slot_mapping[kept],
        query_start_loc=starts,
    )
    return part, len(left_out)
