"""Who talks to whom: boxes inside boxes, and arrows between them. Where each can be seen live is said by the scene's links (`about`: the box)."""

from __future__ import annotations

from pydantic import Field

from engine.errors import InvalidInput
from scenarios.figures.schema import FigureResult, Value
from scenarios.messages import did_you_mean
from scenarios.scene import Part, Sentence


class Box(Part):
    """A box. Places and sizes are in hundredths of the drawing's width and height, from the top left corner. `parent`: the box that it lies in."""

    name: Sentence
    says: str = ""
    symbol: str = Field("", description="what it is called in vLLM's first release")
    x: float = Field(ge=0, le=100)
    y: float = Field(ge=0, le=100)
    width: float = Field(gt=0, le=100)
    height: float = Field(gt=0, le=100)
    parent: str | None = None


class Arrow(Part):
    """Who tells whom what. `both`: it also gets an answer."""

    tail: Sentence
    head: Sentence
    says: str = ""
    both: bool = False


class Parameters(Part):
    boxes: list[Box] = Field(min_length=1, max_length=40)
    arrows: list[Arrow] = Field([], max_length=40)


def compute(parameters: Parameters) -> FigureResult:
    """The boxes and arrows, and which box lies in which. Raises InvalidInput for a name used twice, one that no box has, and a box that sticks out."""
    boxes = {box.name: box for box in parameters.boxes}
    if len(boxes) < len(parameters.boxes):
        twice = next(box.name for i, box in enumerate(parameters.boxes) if box.name in [b.name for b in parameters.boxes[:i]])
        raise InvalidInput(f"two boxes are called “{twice}”; give each its own name")
    for name in [*(b.parent for b in parameters.boxes if b.parent is not None), *(end for a in parameters.arrows for end in (a.tail, a.head))]:
        if name not in boxes:
            raise InvalidInput(f"there is no box “{name}”; {did_you_mean(name, boxes)}")
    for box in parameters.boxes:
        outer = boxes[box.parent] if box.parent is not None else None
        left, top, right, bottom = (0.0, 0.0, 100.0, 100.0) if outer is None else (outer.x, outer.y, outer.x + outer.width, outer.y + outer.height)
        if box.x < left or box.y < top or box.x + box.width > right or box.y + box.height > bottom:
            raise InvalidInput(f"the box “{box.name}” sticks out of {f'“{outer.name}”' if outer else 'the drawing'}; move it or make it smaller")
    values: dict[str, Value] = {f"inside.{name}": [b.name for b in parameters.boxes if b.parent == name] for name in boxes}
    values = {name: inside for name, inside in values.items() if inside}
    values["arrows"] = [f"{a.tail} {'↔' if a.both else '→'} {a.head}" for a in parameters.arrows]
    return FigureResult(values, {"boxes": [b.model_dump() for b in parameters.boxes], "arrows": [a.model_dump() for a in parameters.arrows]})
