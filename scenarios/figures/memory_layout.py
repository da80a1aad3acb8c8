"""Where a card's memory goes, computed from a model's shape, and how many requests the rest can hold (Figure 1 and Table 1 of the paper)."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import Field

from engine.paper import quoted
from engine.paper.memory_model import GB, SHAPES, TABLE_1_KV_CACHE_BYTES, MemoryLayout
from engine.paper.workload import WorkloadRequest
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part
from scenarios.workloads import load_workload

ShapeName = Literal["OPT-13B", "OPT-66B", "OPT-175B", "LLaMA-13B"]


class Parameters(Part):
    """`utilization`: the share of the card that parameters and KV cache may take together. `reserved_tokens`: what a system reserves for every request when it
    does not page; `workload`: whose lengths decide what a request takes when the system does."""

    shape: ShapeName = "OPT-13B"
    card_gb: int = Field(40, ge=1, le=100_000)
    utilization: float = Field(0.95, gt=0, le=1)
    reserved_tokens: int = Field(2048, ge=1, le=1_000_000)
    workload: str = "sharegpt-like"
    block_size: int = Field(16, ge=1, le=256)


def compute(parameters: Parameters) -> FigureResult:
    """Both halves of Figure 1, and Table 1 beside the paper's. Raises InvalidInput where the parameters do not fit or the workload is unknown."""
    p = parameters
    shape = SHAPES[p.shape]
    layout = MemoryLayout(shape, p.card_gb * GB, p.utilization)
    held = tokens_held(p.workload, p.block_size)
    values: dict[str, Value] = {
        "num_parameters": shape.num_parameters,
        "card_gb": p.card_gb,
        "parameters_gb": layout.parameters_bytes / GB,
        "kv_cache_gb": layout.kv_cache_bytes / GB,
        "rest_gb": layout.rest_bytes / GB,
        **{f"percent.{name}": share for name, share in layout.percentages.items()},
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "kv_bytes_per_request": shape.kv_bytes_per_request(p.reserved_tokens),
        "num_slots": layout.num_slots,
        "contiguous.tokens_per_request": p.reserved_tokens,
        "contiguous.max_requests": layout.num_slots // p.reserved_tokens,
        "paged.tokens_per_request": held,
        "paged.max_requests": int(layout.num_slots / held),
    }
    table = _table_1()
    for name, row in table.items():
        values |= {f"table_1.{name}.{field}": value for field, value in row.items()}
    sources = {f"paper.figure_1.{name}": number.label for name, number in quoted.FIGURE_1.items()}
    values |= {f"paper.figure_1.{name}": number.value for name, number in quoted.FIGURE_1.items()}
    for name, numbers in quoted.TABLE_1.items():
        values |= {f"paper.table_1.{name}.{field}": number.value for field, number in numbers.items()}
        sources |= {f"paper.table_1.{name}.{field}": number.label for field, number in numbers.items()}
    unconfirmed = {f"paper.figure_1.{n}": "from memory" for n, number in quoted.FIGURE_1.items() if number.unconfirmed}
    data: dict[str, Any] = {
        "shape": p.shape,
        "values": values,
        "kv_gb_per_request": {
            "contiguous": shape.kv_bytes_per_request(p.reserved_tokens) / GB,
            "paged": shape.kv_bytes_per_token * held / GB,
        },
        "fits": p.card_gb == 40 and p.shape in ("OPT-13B", "LLaMA-13B"),
        "table_1": table,
        "paper_table_1": {name: {field: number.value for field, number in numbers.items()} for name, numbers in quoted.TABLE_1.items()},
        "block_size": p.block_size,
        "reserved_tokens": p.reserved_tokens,
    }
    return FigureResult(values, data, sources, unconfirmed)


@cache
def tokens_held(workload_name: str, block_size: int) -> float:
    """Slots that a running request holds in blocks of `block_size`, averaged over the requests and over their iterations: a request that runs longer counts for
    longer, as it does in memory. Raises InvalidInput for an unknown workload."""
    requests: tuple[WorkloadRequest, ...] = load_workload(workload_name).requests
    held = sum(_blocks_until(r.prompt_len + r.output_len, block_size) - _blocks_until(r.prompt_len, block_size) for r in requests)
    return held * block_size / sum(r.output_len for r in requests)


def _blocks_until(num_tokens: int, block_size: int) -> int:
    """The blocks of a sequence of 1 token, of 2, … of `num_tokens`, all added up."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def _table_1() -> dict[str, dict[str, float]]:
    """Parameters from the shape; slots from the paper's memory for the KV cache, read as GiB."""
    return {
        name: {
            "parameters_gb": SHAPES[name].parameters_bytes / GB,
            "kv_bytes_per_token": SHAPES[name].kv_bytes_per_token,
            "num_slots": SHAPES[name].num_slots(kv_cache_bytes),
        }
        for name, kv_cache_bytes in TABLE_1_KV_CACHE_BYTES.items()
    }
