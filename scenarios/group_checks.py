"""What KV-cache groups, hash sizes and ranks must have to do with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from engine.group_config import GroupConfig, group_problems
from engine.models.mamba_state import cache_mode_problem, state_does_not_fit
from scenarios.model_groups import groups_on, has_states, has_windows, is_here, smallest_block_size
from scenarios.problems import Path
from scenarios.schema import Config, Group, Scenario

_ATTENTION = ("full", "mla", "sliding_window", "chunked_local", "rswa")


def check_groups(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    """Places and sentences for groups that cannot be, or not together, or not with the scenario's model."""
    config = scenario.config
    wrong = False
    for index, group in enumerate(config.kv_cache_groups):
        for name, message in group_problems(group):
            wrong = True
            yield ("config", "kv_cache_groups", index, *([name] if getattr(group, name) is not None else [])), message
    states = list(_states(scenario))
    yield from states
    if not wrong and not states and scenario.engine == "v1":  # of what the paper's engine has not, it is enough to say so
        yield from _sizes(config, config.kv_cache_groups or groups_on(scenario, scenario.model))
    yield from _ranks(config)
    window = config.sliding_window
    if scenario.model == "none":
        if window is not None:
            yield ("config", "sliding_window"), "without a model there is no window to replace; name a group with this window in “kv_cache_groups”"
        return
    if window is not None and not has_windows(scenario.model):
        yield ("config", "sliding_window"), f"every layer of {scenario.model} sees all tokens; leave this out, or take the model tiny-swa"
    if config.kv_cache_groups:
        yield ("config", "kv_cache_groups"), f"the groups of {scenario.model} come from its layers; leave this out, or set “model” to none"
    if config.decode_context_parallel_size > 1:
        yield ("config", "decode_context_parallel_size"), "a model runs on one rank here; leave this out, or set “model” to none"


def _states(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    """What the recurrent states of the scenario's model have to do with its settings."""
    config, model = scenario.config, scenario.model
    mode = config.mamba_cache_mode
    if model == "none":
        for index, group in enumerate(config.kv_cache_groups):
            if group.type == "mamba" and group.mamba_cache_mode == "none" and config.enable_prefix_caching:  # R3.42
                message = "with prefix caching some states must be kept; choose align or all, or turn enable_prefix_caching off"
                yield ("config", "kv_cache_groups", index, "mamba_cache_mode"), f"this is none, but {message}"
        if mode is not None:
            message = "without a model there are no Mamba layers to tell it; name a group with this mode in “kv_cache_groups”"
            yield ("config", "mamba_cache_mode"), message
        return
    known = is_here(model)  # of a model that is not installed nothing is claimed
    problem = cache_mode_problem(model, mode, enable_prefix_caching=config.enable_prefix_caching, has_states=has_states(model)) if known else None
    if problem is not None:
        yield ("config", "mamba_cache_mode"), f"this is {mode}, but {problem}"
    smallest = smallest_block_size(model)
    if config.block_size < smallest:
        yield ("config", "block_size"), f"this is {config.block_size}, but {state_does_not_fit(model, smallest)}"


def _sizes(config: Config, named: Sequence[Group | GroupConfig]) -> Iterator[tuple[Path, str]]:
    ranks = config.decode_context_parallel_size
    groups = [(g.type, g.block_size or config.block_size) for g in named] or [("full", config.block_size)]
    sizes = [size * (ranks if kind in _ATTENTION else 1) for kind, size in groups]
    for name in ("hash_block_size", "prefix_match_unit"):
        unit = getattr(config, name)
        bad = [size for size in sizes if unit is not None and (size % unit if len(sizes) > 1 else size != unit)]
        if not bad:
            continue
        if len(sizes) == 1:
            yield ("config", name), f"this is {unit}, but a single group is hashed by its own blocks of {bad[0]} tokens; leave it out"
        else:
            yield ("config", name), f"this is {unit}, but a block of {bad[0]} tokens is no multiple of it; give a number that divides every group's block size"
    unit = config.scheduler_block_size
    for size in sizes:
        if unit is not None and unit % size:
            yield ("config", "scheduler_block_size"), f"this is {unit}, but it must be a multiple of every group's block size, and {size} is one; correct it"
            return
    hits_end_on, interval = unit or lcm(*sizes), config.retention_interval
    if interval is not None and not any(kind in ("sliding_window", "mamba") for kind, _ in groups):
        yield ("config", "retention_interval"), "no group has a sliding window or recurrent states, so this has no effect; leave it out"
    elif interval is not None and interval % hits_end_on:
        yield ("config", "retention_interval"), f"this is {interval}, but hits end on multiples of {hits_end_on} tokens; give 0 or such a multiple"


def _ranks(config: Config) -> Iterator[tuple[Path, str]]:
    ranks = config.decode_context_parallel_size
    if config.dcp_rank >= ranks:
        yield ("config", "dcp_rank"), f"there is no rank {config.dcp_rank}; with decode_context_parallel_size {ranks} the ranks are 0 to {ranks - 1}"
    if ranks > 1 and config.kv_cache_groups and not any(group.type in _ATTENTION for group in config.kv_cache_groups):
        yield ("config", "decode_context_parallel_size"), "ranks deal out the tokens of attention, and no group has any; leave this out"
    if config.block_size % config.cp_kv_cache_interleave_size:
        size = config.cp_kv_cache_interleave_size
        yield ("config", "cp_kv_cache_interleave_size"), f"this is {size}, but it must divide block_size {config.block_size}, so that a block has whole turns"
