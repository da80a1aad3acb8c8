"""What the slots of the KV cache hold under four systems: recomputed on one workload, beside the bars of the paper's Figure 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from engine.paper.memory_model import PAPER_NUM_SLOTS
from engine.paper.memory_simulation import SimulationResult, compare
from engine.paper.quoted import FIGURE_2, FIGURE_13, PART_NAMES
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part
from scenarios.workloads import load_workload

FROM_MEMORY = "in no source that we could read; the other parts of the same bar and their sum agree"


class Parameters(Part):
    workload: str = "sharegpt-like"
    num_requests: int = Field(2000, ge=1, le=10_000, description="the workload's first requests")
    num_slots: int = Field(PAPER_NUM_SLOTS, ge=16, le=1_000_000, description="token slots of the KV cache")
    block_size: int = Field(16, ge=1, le=256)
    max_model_len: int = Field(2048, ge=1, le=1_000_000)


def compute(parameters: Parameters) -> FigureResult:
    """Four simulated bars (mean over the iterations in which requests wait, so that the memory is under pressure) and the paper's. Raises InvalidInput for an
    unknown workload or sizes that cannot be."""
    p = parameters
    whole = load_workload(p.workload)
    workload = replace(whole, requests=whole.requests[: p.num_requests])
    results = compare(workload, num_slots=p.num_slots, block_size=p.block_size, max_model_len=p.max_model_len)
    values: dict[str, Value] = {"num_requests": len(workload.requests), "num_slots": p.num_slots, "mean_prompt": workload.mean_prompt_len}
    values["mean_output"] = workload.mean_output_len
    bars: list[dict[str, Any]] = []
    sources: dict[str, str] = {}
    unconfirmed: dict[str, str] = {}
    for system in SYSTEMS:
        ours = _shares(results[system])
        values |= {f"{system}.{part}": share for part, share in ours.items()}
        values[f"{system}.sum"] = sum(ours.values())
        values[f"{system}.mean_batch_size"] = results[system].mean_batch_size_while_waiting
        paper = {part: number.value for part, number in FIGURE_2[system].items()}
        values |= {f"paper.{system}.{part}": value for part, value in paper.items()}
        values[f"paper.{system}.sum"] = round(sum(paper.values()), 1)
        values[f"paper.{system}.mean_batch_size"] = FIGURE_13["sharegpt"][system].value
        sources |= {f"paper.{system}.{part}": number.label for part, number in FIGURE_2[system].items()}
        sources[f"paper.{system}.mean_batch_size"] = FIGURE_13["sharegpt"][system].label
        unsure = [part for part, number in FIGURE_2[system].items() if number.unconfirmed]
        unconfirmed |= {f"paper.{system}.{part}": FROM_MEMORY for part in unsure}
        bars.append({"system": SYSTEM_NAMES[system], "name": system, "ours": ours, "paper": paper, "unconfirmed": unsure})
    data = {"bars": bars, "parts": dict(PART_NAMES), "values": values, "workload": {"name": workload.name, "source": workload.source, "note": workload.note}}
    return FigureResult(values, data, sources, unconfirmed)


def _shares(result: SimulationResult) -> dict[str, float]:
    shares = result.shares_while_waiting
    return {"token_states": shares.token_states, "reservation": shares.reservation, "internal": shares.internal, "external": shares.external}
