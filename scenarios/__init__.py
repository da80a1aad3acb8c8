"""Scenarios: scenes as YAML files, each lesson, demo and regression test at once."""

from __future__ import annotations

from scenarios.expectations import Failure
from scenarios.loader import SceneInfo, list_scenarios, load_scenario, parse_scenario, scenario_from_data
from scenarios.other_model import for_model
from scenarios.problems import Problem, ScenarioError
from scenarios.runner import RunResult, open_session, place_notes, resolve_corrections, resolve_notes, run, unconfirmed_notes
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
    "place_notes",
    "resolve_corrections",
    "resolve_notes",
    "run",
    "scenario_from_data",
    "unconfirmed_notes",
]
