"""A figure scene from plain data, with everything that is wrong with it; and its computed values compared with what it expects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from scenarios.expectations import Failure
from scenarios.figures.registry import KINDS, Kind
from scenarios.figures.schema import Expected, FigureResult, FigureScene
from scenarios.messages import did_you_mean, problems_of
from scenarios.problems import Path, Problem, ScenarioError
from scenarios.scene import Part
from scenarios.yaml_source import Source


def figure_from_plain(plain: Mapping[str, Any], source: Source) -> FigureScene:
    """A figure scene from the plain data of its file. Raises ScenarioError with all problems."""
    try:
        scene = FigureScene.model_validate(plain)
    except ValidationError as error:
        problems = problems_of(error, source, FigureScene)
        raise ScenarioError([*problems, *_parameter_problems(plain, source)]) from None
    scene._source = source
    problems = [*_parameter_problems(plain, source), *(source.problem(path, message) for path, message in _links(scene))]
    if problems:
        raise ScenarioError(problems)
    return scene


def parameters_of(scene: FigureScene, changes: Mapping[str, Any] | None = None) -> Part:
    """The scene's parameters, with some of them changed as a screen lets one do. Raises ScenarioError for a change that cannot be."""
    kind = KINDS[scene.figure]
    try:
        return kind.parameters.model_validate({**scene.parameters, **(changes or {})})
    except ValidationError as error:
        raise ScenarioError(problems_of(error, scene.origin, kind.parameters, ("parameters",))) from None


def compute(scene: FigureScene, changes: Mapping[str, Any] | None = None) -> FigureResult:
    """What the scene shows, computed anew. `changes`: parameters that differ from the scene's. Raises InvalidInput, and ScenarioError (an InvalidInput)."""
    return KINDS[scene.figure].compute(parameters_of(scene, changes))


def check_values(scene: FigureScene, result: FigureResult) -> list[Failure]:
    """Compare every expected value with the computed one; what differs, in the order of the file."""
    failures: list[Failure] = []
    for name, wanted in scene.expect.items():
        place = str(scene.origin.problem(("expect", name), "")).removesuffix(": ")
        if name not in result.values:
            failures.append(Failure(place, scene.id, name, wanted, f"no such value is computed; {did_you_mean(name, result.values)}", None))
        elif not _holds(wanted, result.values[name]):
            shown = f"{wanted.value} ± {wanted.tolerance:g}" if isinstance(wanted, Expected) else repr(wanted)
            got = result.values[name]
            failures.append(Failure(place, scene.id, name, wanted, f"expected {shown}, got {got!r}", None))
    return failures


def _holds(wanted: Any, got: Any) -> bool:
    if isinstance(wanted, Expected):
        return _near(wanted.value, got, wanted.tolerance)
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(_holds, wanted, got))
    return bool(wanted == got) and isinstance(wanted, bool) == isinstance(got, bool)


def _near(wanted: Any, got: Any, tolerance: float) -> bool:
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(_near(w, g, tolerance) for w, g in zip(wanted, got, strict=True))
    return _number(got) and math.isclose(wanted, got, rel_tol=1e-12, abs_tol=tolerance * (1 + 1e-9))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parameter_problems(plain: Mapping[str, Any], source: Source) -> list[Problem]:
    name, given = plain.get("figure"), plain.get("parameters", {})
    kind: Kind | None = KINDS.get(name) if isinstance(name, str) else None
    if isinstance(name, str) and kind is None:
        return [source.problem(("figure",), f"there is no figure of the kind “{name}”; {did_you_mean(name, KINDS)}")]
    if kind is None or not isinstance(given, Mapping):
        return []  # pydantic has said so already
    try:
        kind.parameters.model_validate(given)
    except ValidationError as error:
        return problems_of(error, source, kind.parameters, ("parameters",))
    return []


def _links(scene: FigureScene) -> Iterator[tuple[Path, str]]:
    for index, link in enumerate(scene.links):
        if (link.scene is None) == (link.screen is None):
            yield ("links", index), "a link leads to a scene or to a screen; give it “scene” or “screen”, and not both"
        if link.at is not None and link.step is None:
            yield ("links", index, "at"), "an event is named, but no step that shows it; add “step”"
