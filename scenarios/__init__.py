"""Scenarios: scenes as YAML files, each lesson, demo and regression test at once."""

from __future__ import annotations

from scenarios.expectations import Failure
from scenarios.figures.schema import FigureResult, FigureScene
from scenarios.loader import SceneInfo, list_scenarios, list_scenes, load_figure, load_scenario, load_scene, parse_scenario, scenario_from_data
from scenarios.other_model import for_model
from scenarios.problems import Problem, ScenarioError
from scenarios.runner import RunResult, open_session, place_notes, resolve_corrections, resolve_notes, run, unconfirmed_notes
from scenarios.schema import Scenario

__all__ = [
    "Failure",
    "FigureResult",
    "FigureScene",
    "Problem",
    "RunResult",
    "Scenario",
    "ScenarioError",
    "SceneInfo",
    "for_model",
    "list_scenarios",
    "list_scenes",
    "load_figure",
    "load_scenario",
    "load_scene",
    "open_session",
    "parse_scenario",
    "place_notes",
    "resolve_corrections",
    "resolve_notes",
    "run",
    "scenario_from_data",
    "unconfirmed_notes",
]
