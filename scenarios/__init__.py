"""Scenarios: scenes as YAML files, each lesson, demo and regression test at once."""

from __future__ import annotations

from scenarios.expectations import Failure
from scenarios.loader import SceneInfo, list_scenarios, load_scenario, parse_scenario, scenario_from_data
from scenarios.other_model import for_model
from scenarios.problems import Problem, ScenarioError
from scenarios.runner import RunResult, open_session, resolve_notes, run
from scenarios.schema import Scenario

__all__ = [
    "Failure",
    "Problem",
    "RunResult",
    "Scenario",
    "ScenarioError",
    "SceneInfo",
    "for_model",
    "list_scenarios",
    "load_scenario",
    "open_session",
    "parse_scenario",
    "resolve_notes",
    "run",
    "scenario_from_data",
]
