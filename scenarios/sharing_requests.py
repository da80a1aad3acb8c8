"""A handful of requests for the small model, as long as the paper's Alpaca requests are, each to be continued in several ways (Figure 15)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from engine.errors import InvalidInput
from engine.models import load_tokenizer
from engine.models.tiny_tokenizer import read_passages
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.workload import WorkloadRequest, like_alpaca

Decoding = Literal["parallel_sampling", "beam_search"]
MODEL = "tiny"
NUM_REQUESTS = 8


def sharing_lengths() -> tuple[WorkloadRequest, ...]:
    """Eight requests made like the workload “Lengths like Alpaca”: 18.8 prompt and 56.0 output tokens on average."""
    return tuple(replace(request, request_id=chr(ord("A") + i)) for i, request in enumerate(like_alpaca(NUM_REQUESTS).requests))


def sharing_requests(decoding: Decoding, width: int) -> tuple[PaperRequestSpec, ...]:
    """The eight requests with `width` outputs each: samples drawn at temperature 1, or the candidates of a beam search. Every prompt is the beginning of a
    passage that `tiny` knows, cut to its length; no output ends before its length. Raises InvalidInput for a width below 2 or too large."""
    if width < 2:
        raise InvalidInput(f"the width is {width}, but sharing takes at least 2 outputs")
    tokenizer = load_tokenizer(MODEL)
    passages = [ids for text in read_passages().values() if len(ids := tokenizer.encode(text)) >= 40]
    beams = decoding == "beam_search"
    return tuple(
        PaperRequestSpec(
            length.request_id,
            tuple(passage[: length.prompt_len]),
            max_tokens=length.output_len,
            n=width,
            beam_width=width if beams else None,
            temperature=0.0 if beams else 1.0,
            seed=100 * index,
        )
        for index, (length, passage) in enumerate(zip(sharing_lengths(), passages, strict=False))
    )


def sharing_config(block_size: int, width: int) -> PaperConfig:
    """Memory and seats for all of them at once, with room for the moment when beams are chosen."""
    blocks = sum(-(-(r.prompt_len + r.output_len) // block_size) + 1 for r in sharing_lengths())
    return PaperConfig(num_blocks=2 * width * blocks, block_size=block_size, max_num_seqs=NUM_REQUESTS * width, max_num_batched_tokens=512)
