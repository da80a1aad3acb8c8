"""Heads of 256 numbers in a large batch: the tile of queries alone can have more elements than a program may hold."""

from __future__ import annotations

import torch

import kernels
from kernels.launch_attention import INTERPRETED_ELEMENTS


def test_eight_prompts_with_gemmas_heads_fit_into_the_interpreters_programs(batch_of, dense):
    """Four query heads on one KV head, as Gemma 3 270M has them: eight prompts are 24 blocks of 64 queries, so 32 lanes of 256 rows of 256 numbers are too
    many for one program."""
    assert INTERPRETED_ELEMENTS < 32 * 256 * 256
    batch = batch_of([130] * 8, [130] * 8, num_q_heads=4, num_kv_heads=1, head_dim=256, block_size=16)
    out = kernels.paged_attention(*batch.arguments, scale=0.0625, sliding_window=100, backend="interpret")
    torch.testing.assert_close(out.double(), dense(batch, 0.0625, 100), atol=2e-6, rtol=1e-5)
