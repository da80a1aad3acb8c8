"""The last step of a forward pass: from the hidden states of each request's newest token to its logits.

Most of a small model's step may be this one product: 262,144 rows of weights in Gemma 3 270M against 18 narrow layers. A few tokens times a tall matrix is
what BLAS libraries do worst; with the matrix on the left the same product takes half the time on an x86 CPU (`tests/bench/bench_generate_batch.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.models.supported import SUPPORTED_ARCHITECTURES

FEW = range(2, 9)
"""Numbers of tokens for which the matrix goes to the left. One token is a product of a matrix and a vector and is bound by memory either way; from nine tokens
on the usual order is the faster one."""
MANY_ROWS = 16_384
"""Vocabularies that are smaller take no time to speak of."""


def last_token_logits(model: PreTrainedModel, last_tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Run `model` on `inputs` (a batch of one, flattened) and return the logits of the tokens at the places `last_tokens` (int64 [num_reqs]) of the batch:
    float32 [num_reqs, vocab], each row dense. What comes out is what the model itself would give with `logits_to_keep`, up to rounding."""
    head = _plain_head(model)
    if head is None:
        logits: torch.Tensor = model(logits_to_keep=last_tokens, **inputs).logits[0]
        return logits.float()
    hidden: torch.Tensor = model.base_model(**inputs).last_hidden_state[0, last_tokens]
    return project(hidden, head.weight).float()


def project(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden` [num_tokens, hidden_size] times `weight` [vocab, hidden_size], transposed: [num_tokens, vocab], dense."""
    if hidden.device.type == "cpu" and hidden.shape[0] in FEW and weight.shape[0] >= MANY_ROWS:
        return torch.mm(weight, hidden.t()).t().contiguous()
    return torch.nn.functional.linear(hidden, weight)


def _plain_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The model's output projection, when it is known that the logits are its product with the hidden states and nothing else."""
    head = model.get_output_embeddings()
    plain = type(model).__name__ in SUPPORTED_ARCHITECTURES and type(head) is torch.nn.Linear and head.bias is None
    capped = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None) is not None
    return head if plain and not capped else None
