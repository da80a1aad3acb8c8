"""What the file of a figure scene may say: what is computed (`figure`, `parameters`), sentences for the learner, links, and values that must come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from scenarios.scene import ID_PATTERN, Part, Scene, Sentence
from scenarios.schema import RULE_PATTERN, Selector

Value: TypeAlias = int | float | str | bool | list[Any] | None


class FigureNote(Part):
    """A sentence for the learner. `unconfirmed`: it names a value that no source confirms; the screen marks it."""

    say: Sentence
    unconfirmed: bool = False


class FigureCorrection(Part):
    """“What you may have read”: what a text on the subject says, what is right instead, and the rule that tells them apart."""

    read: Sentence
    really: Sentence
    rule: str = Field(pattern=RULE_PATTERN)


class FigureLink(Part):
    """Where something of the figure can be seen: a scene, and if wanted the step that its stage opens at; or another screen.

    `at` names the event that the step shows; a test keeps both together. `about` names the part of the figure that the link belongs to.
    """

    say: Sentence
    scene: str | None = Field(None, pattern=ID_PATTERN)
    screen: Literal["memory"] | None = None
    step: int | None = Field(None, ge=0)
    at: Selector | None = None
    about: str | None = None


class Expected(Part):
    """A value that must come out, up to `tolerance` in either direction."""

    value: float | int | list[float | int]
    tolerance: float = Field(gt=0, description="how far the computed value may lie from it")


def _expected(value: Any) -> Any:
    if isinstance(value, dict):
        return Expected.model_validate(value)
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        raise ValueError("an expected value is a number, a text, true, false or a list of these, or {value: …, tolerance: …}")
    return value


class FigureScene(Scene):
    """One figure: computed from its parameters, with the values that must come out of it."""

    goal: Sentence = Field(description="one sentence: what somebody knows after looking at it")
    figure: str = Field(description="the kind of figure")
    parameters: dict[str, Any] = Field({}, description="what it is computed from; the fields depend on the kind")
    notes: list[FigureNote] = Field([])
    corrections: list[FigureCorrection] = Field([])
    links: list[FigureLink] = Field([])
    expect: dict[str, Annotated[Any, BeforeValidator(_expected)]] = Field({}, description="name of a computed value -> what it must be")


@dataclass(frozen=True)
class FigureResult:
    """What a figure scene computes.

    `values`: dotted name -> number, text or list; what `expect` is checked against and `--json` prints. `data`: the same and more, structured for drawing.
    `quoted`: names of values that a source says and nothing here computed, each with where it stands. `unconfirmed`: those of them that no source that we
    could read confirms, each with the reason.
    """

    values: dict[str, Value]
    data: dict[str, Any] = field(default_factory=dict)
    quoted: dict[str, str] = field(default_factory=dict)
    unconfirmed: dict[str, str] = field(default_factory=dict)
