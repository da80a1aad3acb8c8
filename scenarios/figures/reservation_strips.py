"""Requests in contiguous chunks, slot by slot as in the paper's Figure 3, and the same requests in blocks."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from engine.errors import InvalidInput
from engine.paper.reservation import reserved_slots, split_of
from engine.paper.workload import WorkloadRequest
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part, Sentence
from scenarios.schema import RequestId


class StripRequest(Part):
    """A request in its chunk. `strip`: what the drawing prints behind the prompt; `num_later`: slots that will hold a token later, after that of the current
    iteration, as the drawing counts them. The two are kept apart because the drawing does not count both `<eos>` alike."""

    id: RequestId
    prompt: list[Sentence] = Field(min_length=1, max_length=64)
    strip: list[Sentence] = Field(min_length=1, max_length=64)
    num_later: int = Field(ge=0, le=10_000)
    max_length: int = Field(ge=1, le=100_000, description="tokens that the system reserves room for")


class Parameters(Part):
    requests: list[StripRequest] = Field(min_length=1, max_length=8)
    gap_slots: int = Field(ge=0, le=100_000, description="unusable slots between the chunks")
    block_size: int = Field(4, ge=1, le=256)


def compute(parameters: Parameters) -> FigureResult:
    """What each chunk's slots are for, and how many blocks the same tokens take. Raises InvalidInput for an id used twice or a chunk that is too short."""
    p = parameters
    values: dict[str, Value] = {}
    chunks: list[dict[str, Any]] = []
    start = 0
    for request in p.requests:
        if f"{request.id}.slots" in values:
            raise InvalidInput(f"the id “{request.id}” is used twice; give each request its own")
        known = WorkloadRequest(0.0, len(request.prompt), 1 + request.num_later, request.id)
        num_slots = reserved_slots("orca_max", known, request.max_length)
        split = split_of(known, 1, num_slots)
        parts = {"prompt": len(request.prompt), "now": 1, "later": split.reserved, "never": split.internal}
        values |= {f"{request.id}.{name}": count for name, count in parts.items()}
        values |= {f"{request.id}.slots": num_slots, f"{request.id}.start": start}
        blocks = -(-split.token_states // p.block_size)
        paged = {"blocks": blocks, "slots": blocks * p.block_size, "empty": blocks * p.block_size - split.token_states}
        values |= {f"{request.id}.paged.{name}": count for name, count in paged.items()}
        chunks.append({"id": request.id, "words": [*request.prompt, *request.strip], **parts, "slots": num_slots, "start": start, "paged": paged})
        start += num_slots + p.gap_slots
    used = sum(c["prompt"] + c["now"] for c in chunks)
    contiguous = start - p.gap_slots
    paged_slots = sum(c["paged"]["slots"] for c in chunks)
    values |= {"gap": p.gap_slots, "used": used, "contiguous_slots": contiguous, "paged_slots": paged_slots}
    values |= {"contiguous_used_percent": 100 * used / contiguous, "paged_used_percent": 100 * used / paged_slots}
    return FigureResult(values, {"chunks": chunks, "gap_slots": p.gap_slots, "block_size": p.block_size, "values": values})
