"""The KV-cache groups that a scenario runs with: those it names, or those of its model's layers."""

from __future__ import annotations

from engine.errors import InvalidInput
from engine.group_config import GroupConfig
from engine.models import has_mamba_layers, kv_cache_groups_of, sliding_window_of, smallest_block_size_of
from engine.models.catalog import resolve
from engine.session_base import NO_MODEL
from scenarios.schema import Scenario


def groups_on(scenario: Scenario, model: str) -> tuple[GroupConfig, ...]:
    """The groups that `model` has with the scenario's settings; () for one full-attention group, and for a model that is not there or
    cannot have the scenario's window, mode or block size."""
    if model == NO_MODEL or scenario.engine != "v1":
        return ()
    config = scenario.config
    try:
        return kv_cache_groups_of(
            model,
            config.block_size,
            config.sliding_window,
            mamba_cache_mode=config.mamba_cache_mode,
            enable_prefix_caching=config.enable_prefix_caching,
            max_model_len=config.max_model_len,
        )
    except InvalidInput:
        return ()  # said where the model is looked for, and by `check_groups`


def is_here(model: str) -> bool:
    """Whether the model's config.json can be asked, or there is no model to ask."""
    try:
        return model == NO_MODEL or bool(resolve(model))
    except InvalidInput:
        return False


def num_groups(scenario: Scenario) -> int | None:
    """How many groups the scenario has on its own model; None for a model that is not there, of which nothing is known."""
    if scenario.engine == "v1" and not scenario.config.kv_cache_groups and not is_here(scenario.model):
        return None
    return len(scenario.config.kv_cache_groups or groups_on(scenario, scenario.model)) or 1


def has_windows(model: str) -> bool:
    """Whether some layer of the model sees a window only; True for a model that is not there, of which nothing is known."""
    try:
        return sliding_window_of(model) is not None
    except InvalidInput:
        return True


def has_states(model: str) -> bool:
    """Whether some layer of the model has a recurrent state; False for a model that is not there."""
    try:
        return has_mamba_layers(model)
    except InvalidInput:
        return False


def smallest_block_size(model: str) -> int:
    """The fewest tokens per block that the model can have; 1 for a model that is not there."""
    try:
        return smallest_block_size_of(model)
    except InvalidInput:
        return 1
