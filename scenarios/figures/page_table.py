"""An operating system's page table beside a block table: the same lookup twice, and what has a counterpart (section 4.3 of the paper draws the parallel)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.errors import InvalidInput
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part, Sentence


class Counterpart(Part):
    """One idea of virtual memory and what stands in its place in a paged KV cache."""

    system: Sentence = Field(description="in an operating system")
    cache: Sentence = Field(description="in the KV cache")
    match: Literal["same", "similar", "none"]
    say: Sentence


class Parameters(Part):
    """`page_table`: virtual page -> frame, None for a page that is not mapped. `block_table`: logical block -> physical block. `position`: the token that is
    looked up; the address that is looked up beside it lies as far into its page: `position` x `page_bytes` / `block_size`."""

    page_bytes: int = Field(4096, ge=2, le=1 << 30)
    page_table: list[int | None] = Field(min_length=1, max_length=16)
    num_frames: int = Field(ge=1, le=64)
    block_size: int = Field(4, ge=1, le=256)
    block_table: list[int] = Field(min_length=1, max_length=16)
    num_blocks: int = Field(ge=1, le=64)
    tokens: list[Sentence] = Field(min_length=1, max_length=256)
    position: int = Field(0, ge=0)
    counterparts: list[Counterpart] = Field([], max_length=40)


def compute(parameters: Parameters) -> FigureResult:
    """Both lookups of one position. Raises InvalidInput for tables that name what is not there, and for a position without a token."""
    p = parameters
    _check(p)
    logical_block, offset = divmod(p.position, p.block_size)
    physical_block = p.block_table[logical_block]
    address = p.position * p.page_bytes // p.block_size
    page, byte = divmod(address, p.page_bytes)
    frame = p.page_table[page] if page < len(p.page_table) else None
    values: dict[str, Value] = {
        "position": p.position,
        "token": p.tokens[p.position],
        "logical_block": logical_block,
        "block_offset": offset,
        "physical_block": physical_block,
        "slot": physical_block * p.block_size + offset,
        "virtual_address": address,
        "virtual_page": page,
        "page_offset": byte,
        "frame": frame,
        "physical_address": None if frame is None else frame * p.page_bytes + byte,
        "num_counterparts": sum(c.match != "none" for c in p.counterparts),
        "num_without_counterpart": sum(c.match == "none" for c in p.counterparts),
        "slots": [p.block_table[t // p.block_size] * p.block_size + t % p.block_size for t in range(len(p.tokens))],
    }
    data = {
        **values,
        "page_bytes": p.page_bytes,
        "page_table": p.page_table,
        "num_frames": p.num_frames,
        "block_size": p.block_size,
        "block_table": p.block_table,
        "num_blocks": p.num_blocks,
        "tokens": p.tokens,
        "counterparts": [c.model_dump() for c in p.counterparts],
    }
    return FigureResult(values, data)


def _check(p: Parameters) -> None:
    wanted = -(-len(p.tokens) // p.block_size)
    if len(p.block_table) < wanted:
        raise InvalidInput(f"{len(p.tokens)} tokens need {wanted} blocks of {p.block_size}, but the block table has {len(p.block_table)}; make it longer")
    if p.position >= len(p.tokens):
        raise InvalidInput(f"there is no token at position {p.position}; the positions are 0 to {len(p.tokens) - 1}")
    for name, table, size in (("block_table", p.block_table, p.num_blocks), ("page_table", [f for f in p.page_table if f is not None], p.num_frames)):
        if any(not 0 <= entry < size for entry in table):
            raise InvalidInput(f"the {name} is {table}, but its entries must lie between 0 and {size - 1}; correct it")
    if p.page_bytes % p.block_size:
        raise InvalidInput(f"a page of {p.page_bytes} bytes cannot be divided like a block of {p.block_size} tokens; give a multiple of {p.block_size}")
