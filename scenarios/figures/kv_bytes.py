"""What one token costs: a key and a value for every layer and every KV head (section 3 of the paper)."""

from __future__ import annotations

from pydantic import Field

from engine.errors import InvalidInput
from engine.paper import quoted
from scenarios.figures.schema import FigureResult, Value
from scenarios.scene import Part, Sentence


class Shape(Part):
    """The sizes of a model that decide about its KV cache. `paper`: the one whose cost the paper prints."""

    name: Sentence
    num_layers: int = Field(ge=1, le=10_000)
    num_kv_heads: int = Field(ge=1, le=10_000)
    head_size: int = Field(ge=1, le=10_000)
    dtype_bytes: int = Field(2, ge=1, le=8)
    source: str = ""
    paper: bool = False


class Parameters(Part):
    shapes: list[Shape] = Field(min_length=1, max_length=30)
    request_tokens: int = Field(2048, ge=1, le=10_000_000, description="tokens of one request")


def compute(parameters: Parameters) -> FigureResult:
    """Bytes per token and per request of every shape. Raises InvalidInput for a name that is used twice."""
    values: dict[str, Value] = {}
    rows = []
    for shape in parameters.shapes:
        if f"{shape.name}.bytes_per_token" in values:
            raise InvalidInput(f"two shapes are called “{shape.name}”; give each its own name")
        width = shape.num_kv_heads * shape.head_size
        per_token = 2 * width * shape.num_layers * shape.dtype_bytes
        per_request = per_token * parameters.request_tokens
        values |= {f"{shape.name}.bytes_per_token": per_token, f"{shape.name}.bytes_per_request": per_request, f"{shape.name}.width": width}
        rows.append({**shape.model_dump(), "width": width, "bytes_per_token": per_token, "bytes_per_request": per_request})
    token, request = quoted.KV_BYTES_PER_TOKEN, quoted.KV_BYTES_PER_REQUEST
    values |= {"paper.kb_per_token": token.value, "paper.gb_per_request": request.value}
    sources = {"paper.kb_per_token": token.label, "paper.gb_per_request": request.label}
    return FigureResult(values, {"shapes": rows, "request_tokens": parameters.request_tokens, "paper": values}, sources)
