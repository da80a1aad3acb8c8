"""Finds scenarios, reads them, and says everything that is wrong with them at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.errors import InvalidInput
from scenarios.checks import check
from scenarios.figures.reading import figure_from_plain
from scenarios.figures.schema import FigureScene
from scenarios.messages import nearest, problems_of
from scenarios.problems import Problem, ScenarioError
from scenarios.schema import Scenario
from scenarios.yaml_source import MAX_BYTES, Source, read_yaml

LIBRARY = Path(__file__).parent / "library"
GROUPS = ("paper", "vllm", "limits", "bugs")
READING_ORDER = (
    *(f"figure-{number}" for number in range(1, 11)),
    *("parallel-sampling", "beam-search", "swap-or-recompute"),
    *("page-table", "iteration-level-batching", "kv-bytes"),
    *("figure-6-v1", "figure-6-prepared", "figure-7-v1", "slot-mapping-16"),
    *("same-prompt-twice", "putting-it-together", "duplicates", "same-step-sharing", "salt-and-adapter"),
    *("parallel-sampling-v1", "beam-search-v1", "chunked-prefill"),
    *("eviction-order", "touch-rescues", "docs-prefix-caching-printed", "docs-prefix-caching"),
    *("admission-sum", "preemption", "one-victim-two-heirs", "several-victims"),
    *("sliding-window", "window-of-2048", "window-in-chunks", "sliding-window-live", "window-too-small", "gemma-window"),
    *("stale-row", "stale-tail", "chunked-local", "outputs-window"),
    *("hybrid-full-and-window", "fixed-point", "retention-interval", "docs-hybrid-printed", "docs-hybrid"),
    *("mamba-all", "mamba-align", "hybrid-state-live", "hybrid-all-live", "hybrid-why-no-hit"),
    *("sixteen-and-sixty-four", "sixteen-and-sixty-four-align", "partial-hit-copy", "hybrid-partial-hit-live"),
    *("latent-attention", "decode-context-parallelism"),
)
"""Scenes that build on each other; those that are not named follow behind the others of their group, by name. A name may wait for its scene."""


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
    figure: str | None = None
    """The kind of figure, None for a scene that runs on the stage."""
    model: str | None = None
    """The model that a scene on the stage runs, None for a figure."""


def scene_files() -> dict[str, Path]:
    """Id -> file of all scenes, those on the stage and figures, group by group, within a group in reading order."""
    places = {scene_id: place for place, scene_id in enumerate(READING_ORDER)}
    files = [path for group in GROUPS for path in sorted((LIBRARY / group).glob("*.yaml"))]
    files.sort(key=lambda path: (GROUPS.index(path.parent.name), places.get(path.stem, len(places)), path.stem))
    return {path.stem: path for path in files}


def library_files() -> dict[str, Path]:
    """Id -> file of the scenes that run on the stage."""
    return {scene_id: path for scene_id, path in scene_files().items() if not _is_figure(path)}


def figure_files() -> dict[str, Path]:
    """Id -> file of the figure scenes."""
    return {scene_id: path for scene_id, path in scene_files().items() if _is_figure(path)}


def list_scenarios() -> list[SceneInfo]:
    """The scenes of the library that run on the stage. Raises ScenarioError when one of them is broken."""
    return [info for info in list_scenes() if info.figure is None]


def list_scenes() -> list[SceneInfo]:
    """All scenes of the library, figures too, as a gallery shows them. Raises ScenarioError when one of them is broken."""
    scenes = [load_scene(scene_id) for scene_id in scene_files()]
    kinds = [(s.figure, None) if isinstance(s, FigureScene) else (None, s.model) for s in scenes]
    return [SceneInfo(s.id, s.title, s.goal, s.source, s.group or "", *kind) for s, kind in zip(scenes, kinds, strict=True)]


def load_scenario(id_or_path: str | os.PathLike[str]) -> Scenario:
    """A scene of the library by its id, or any scenario file by its path (anything that ends in .yaml or .yml or has a slash).

    Raises InvalidInput for an unknown id or an unreadable file, ScenarioError (an InvalidInput) for what is wrong inside it.
    """
    scene = load_scene(id_or_path)
    if isinstance(scene, FigureScene):
        raise ScenarioError(
            [scene.origin.problem(("figure",), f"“{scene.id}” is a figure: it is computed at once and has no steps; choose a scene with requests")]
        )
    return scene


def load_figure(id_or_path: str | os.PathLike[str]) -> FigureScene:
    """A figure scene, found as `load_scenario` finds a scenario. Raises the same."""
    scene = load_scene(id_or_path)
    if isinstance(scene, Scenario):
        raise ScenarioError([scene.origin.problem((), f"“{scene.id}” is not a figure: it runs step by step; choose a scene with a field “figure”")])
    return scene


def load_scene(id_or_path: str | os.PathLike[str]) -> Scenario | FigureScene:
    """A scene of either kind, by its id or its path. Raises as `load_scenario`."""
    name = os.fspath(id_or_path)
    if not isinstance(id_or_path, str) or name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        return _read(Path(name), name)
    files = scene_files()
    if name not in files:
        near = nearest(name, files)
        hint = f"did you mean “{near}”? " if near else ""
        raise InvalidInput(f"there is no scene “{name}”: {hint}`python -m scenarios list` shows all of them, and a file of your own is named with its .yaml")
    return _library_scene(name)


def parse_scenario(data: bytes | str, name: str) -> Scenario:
    """A scenario from the text of its file. `name` is what messages call it. Raises ScenarioError with all problems."""
    plain, source = read_yaml(data, name)
    return _validated(plain, source)


def parse_scene(data: bytes | str, name: str) -> Scenario | FigureScene:
    """A scene of either kind from the text of its file: with a field “figure” it is a figure scene. Raises ScenarioError with all problems."""
    plain, source = read_yaml(data, name)
    return figure_from_plain(plain, source) if "figure" in plain else _validated(plain, source)


def scenario_from_data(data: Mapping[str, Any], name: str = "the scenario") -> Scenario:
    """A scenario from plain data: a form on a screen, or the header of a trace. Raises ScenarioError with all problems."""
    plain = dict(data)
    for placed in PLACED:
        plain.pop(placed, None)
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
def _library_scene(scene_id: str) -> Scenario | FigureScene:
    path = scene_files()[scene_id]
    scene = _read(path, f"{path.parent.name}/{path.name}")
    if scene.id != scene_id:
        raise ScenarioError([scene.origin.problem(("id",), f"a scene of the library bears the name of its file; call it “{scene_id}”")])
    scene._group = path.parent.name
    return scene


@cache
def _is_figure(path: Path) -> bool:
    """Whether a file of the library is a figure scene: known without reading it as YAML, since lists of scenes are asked for all the time."""
    return re.search(rb"^figure\s*:", path.read_bytes(), re.MULTILINE) is not None


def _read(path: Path, name: str) -> Scenario | FigureScene:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ScenarioError([Problem(name, None, (), f"the file cannot be read ({reason}); check the path")]) from None
    return parse_scene(data, name)
