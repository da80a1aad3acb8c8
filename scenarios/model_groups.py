"""The KV-cache groups that a scenario runs with: those it names, or those of its model's layers."""

from __future__ import annotations

from engine.errors import InvalidInput
from engine.group_config import GroupConfig
from engine.models import kv_cache_groups_of, sliding_window_of
from engine.session_base import NO_MODEL
from scenarios.schema import Scenario


def groups_on(scenario: Scenario, model: str) -> tuple[GroupConfig, ...]:
    """The groups that `model` has with the scenario's settings; () for one full-attention group, and for a model that is not there or
    cannot have the scenario's window."""
    if model == NO_MODEL or scenario.engine != "v1":
        return ()
    try:
        return kv_cache_groups_of(model, scenario.config.block_size, scenario.config.sliding_window)
    except InvalidInput:
        return ()  # said where the model is looked for, and by `check_groups`


def num_groups(scenario: Scenario) -> int:
    """How many groups the scenario has on its own model."""
    return len(scenario.config.kv_cache_groups or groups_on(scenario, scenario.model)) or 1


def has_windows(model: str) -> bool:
    """Whether some layer of the model sees a window only; True for a model that is not there, of which nothing is known."""
    try:
        return sliding_window_of(model) is not None
    except InvalidInput:
        return True
