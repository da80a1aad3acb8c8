"""Finds scenarios, reads them, and says everything that is wrong with them at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.errors import InvalidInput
from scenarios.checks import check
from scenarios.messages import nearest, problems_of
from scenarios.problems import Problem, ScenarioError
from scenarios.schema import Scenario
from scenarios.yaml_source import MAX_BYTES, Source, read_yaml

LIBRARY = Path(__file__).parent / "library"
GROUPS = ("paper", "vllm", "limits", "bugs")
READING_ORDER = (
    *("figure-6", "figure-7"),
    *("figure-6-v1", "same-prompt-twice", "duplicates", "same-step-sharing", "salt-and-adapter", "chunked-prefill"),
    *("eviction-order", "touch-rescues", "docs-prefix-caching-printed", "docs-prefix-caching"),
    *("preemption", "one-victim-two-heirs", "several-victims"),
    *("sliding-window", "hybrid-full-and-window", "fixed-point", "docs-hybrid-printed", "docs-hybrid"),
    *("mamba-all", "mamba-align", "partial-hit-copy", "latent-attention", "decode-context-parallelism"),
)
"""Scenes that build on each other; those that are not named follow behind the others of their group, by name."""


PLACED = ("resolved_notes", "resolved_corrections", "unconfirmed_notes")
"""What a trace's header adds to the scenario: its sentences by frame."""


@dataclass(frozen=True)
class SceneInfo:
    """What a gallery shows of a scene."""

    id: str
    title: str
    goal: str
    source: str
    group: str


def library_files() -> dict[str, Path]:
    """Scene id -> file, group by group, within a group in reading order."""
    places = {scene_id: place for place, scene_id in enumerate(READING_ORDER)}
    files = [path for group in GROUPS for path in sorted((LIBRARY / group).glob("*.yaml"))]
    files.sort(key=lambda path: (GROUPS.index(path.parent.name), places.get(path.stem, len(places)), path.stem))
    return {path.stem: path for path in files}


def list_scenarios() -> list[SceneInfo]:
    """The scenes of the library. Raises ScenarioError when one of them is broken."""
    scenarios = [load_scenario(scene_id) for scene_id in library_files()]
    return [SceneInfo(s.id, s.title, s.goal, s.source, s.group or "") for s in scenarios]


def load_scenario(id_or_path: str | os.PathLike[str]) -> Scenario:
    """A scene of the library by its id, or any scenario file by its path (anything that ends in .yaml or .yml or has a slash).

    Raises InvalidInput for an unknown id or an unreadable file, ScenarioError (an InvalidInput) for what is wrong inside it.
    """
    name = os.fspath(id_or_path)
    if not isinstance(id_or_path, str) or name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        return _read(Path(name), name)
    files = library_files()
    if name not in files:
        near = nearest(name, files)
        hint = f"did you mean “{near}”? " if near else ""
        raise InvalidInput(f"there is no scene “{name}”: {hint}`python -m scenarios list` shows all of them, and a file of your own is named with its .yaml")
    return _library_scenario(name)


def parse_scenario(data: bytes | str, name: str) -> Scenario:
    """A scenario from the text of its file. `name` is what messages call it. Raises ScenarioError with all problems."""
    plain, source = read_yaml(data, name)
    return _validated(plain, source)


def scenario_from_data(data: Mapping[str, Any], name: str = "the scenario") -> Scenario:
    """A scenario from plain data: a form on a screen, or the header of a trace. Raises ScenarioError with all problems."""
    plain = dict(data)
    for name in PLACED:
        plain.pop(name, None)
    group = plain.pop("group", None)
    scenario = _validated(plain, Source(name))
    scenario._group = group if group in GROUPS else None
    return scenario


def _validated(plain: Mapping[str, Any], source: Source) -> Scenario:
    try:
        scenario = Scenario.model_validate(plain)
    except ValidationError as error:
        raise ScenarioError(problems_of(error, source)) from None
    scenario._source = source
    problems = check(scenario)
    if problems:
        raise ScenarioError(problems)
    return scenario


@cache
def _library_scenario(scene_id: str) -> Scenario:
    path = library_files()[scene_id]
    scenario = _read(path, f"{path.parent.name}/{path.name}")
    if scenario.id != scene_id:
        raise ScenarioError([scenario.origin.problem(("id",), f"a scene of the library bears the name of its file; call it “{scene_id}”")])
    scenario._group = path.parent.name
    return scenario


def _read(path: Path, name: str) -> Scenario:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ScenarioError([Problem(name, None, (), f"the file cannot be read ({reason}); check the path")]) from None
    return parse_scenario(data, name)
