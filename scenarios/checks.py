"""What the fields of a scenario must have to do with each other, as far as it can be seen without a model."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Literal

from engine.trace import events
from engine.trace.events import CauseKind
from scenarios.group_checks import check_groups
from scenarios.messages import did_you_mean
from scenarios.model_groups import num_groups
from scenarios.paper_checks import PAPER_STATUSES, check_engine, name_problem, paper_facts, several_sequences
from scenarios.problems import Path, Problem
from scenarios.schema import POINT_KINDS, SELECTOR_KINDS, Expectation, Scenario, Selector

_EVENTS: dict[str, type[events.Event]] = {str(t.__struct_config__.tag): t for t in typing.get_args(events.AnyEvent)}
_STATUSES = ("WAITING", "RUNNING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_ERROR")
_EVENT_FACTS = ("block_ids", "slots", "num_hit_tokens")
_TABLES = ("block_table", "worker_row", "stale_tail")
_BY_REQUEST = (*_TABLES, "status", "num_computed_tokens", "num_cached_block", "tokens", "output_text", "cpu_block_table", "parents")
_WITH_BLOCKS = {"evict_blocks": "lose their hashes", "arrange_free_queue": "are in the free queue, in which order"}
_LISTS_OF_REQUESTS = ("running", "waiting", "swapped")
_BY_BLOCK = ("num_filled", "block_tokens", "ref_cnt", "hash_names", "num_state_tokens")
_LISTS_OF_BLOCKS = ("free_queue", "free_queue_starts_with", "hashed")
_WHOLE_REQUESTS = ("waiting", "swapped")


def check(scenario: Scenario) -> list[Problem]:
    """All problems of a scenario whose fields are right one by one."""
    return [scenario.origin.problem(path, message) for path, message in _found(scenario)]


def _found(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    yield from _config(scenario)
    yield from check_engine(scenario)
    yield from check_groups(scenario)
    yield from _requests(scenario)
    yield from _actions(scenario)
    for part in ("notes", "corrections", "questions", "expect"):
        for index, entry in enumerate(getattr(scenario, part)):
            yield from _selector(scenario, (part, index, "at"), entry.at)
    for index, expectation in enumerate(scenario.expect):
        yield from _expectation(scenario, ("expect", index), expectation)


def _config(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    config = scenario.config
    seen: set[int] = set()
    for index, block_id in enumerate(config.free_queue_order):
        path: Path = ("config", "free_queue_order", index)
        if block_id == 0 and scenario.engine == "v1":
            yield path, "block 0 is the null block and is never handed out; take it out of the list"
        elif not 0 <= block_id < config.num_blocks:
            pool = f"{_first(scenario)} to {config.num_blocks - 1}{' besides the null block' if scenario.engine == 'v1' else ''}"
            yield path, f"there is no block {block_id}; the pool has the blocks {pool}"
        elif block_id in seen:
            yield path, f"block {block_id} stands in the list twice; it can be handed out first only once"
        seen.add(block_id)


def _first(scenario: Scenario) -> int:
    """The first block that can be handed out: V1 keeps block 0 as its null block, the paper has none."""
    return 1 if scenario.engine == "v1" else 0


def _requests(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    first: dict[str, int] = {}
    for index, request in enumerate(scenario.requests):
        path: Path = ("requests", index)
        if request.id in first:
            yield (*path, "id"), f"the id “{request.id}” is used twice, first by requests[{first[request.id]}]; give each request its own"
        first.setdefault(request.id, index)
        given = [name for name in ("prompt", "prompt_token_ids", "prompt_length") if getattr(request, name) is not None]
        if not given:
            yield path, "this request has no prompt; give it a “prompt” (a text) or “prompt_token_ids” (a list of numbers)"
        if len(given) > 1:
            yield path, f"this request has a {' and '.join(given)}; keep one of them"
        if request.prompt_length is not None and scenario.model != "none":
            message = f"tokens that mean nothing are nothing for {scenario.model} to read; write a “prompt”, or set “model” to none"
            yield (*path, "prompt_length"), message
        if len(request.force) > request.output_limit:
            yield (*path, "force"), f"{len(request.force)} outputs are forced, but max_tokens is {request.output_limit}; raise it or force fewer"
        dictated = request.force_samples or request.force_beams
        if scenario.model == "none" and not several_sequences(request) and not dictated and len(request.force) < request.output_limit:
            message = f"without a model every output must be forced: {len(request.force)} of {request.output_limit} are; force the rest or name a model"
            yield (*path, "force"), message
        if request.priority and scenario.config.policy != "priority":
            yield (*path, "priority"), "a priority matters only under the policy “priority”; set config.policy to it, or leave the priority out"


def _actions(scenario: Scenario) -> Iterator[tuple[Path, str]]:
    for index, action in enumerate(scenario.actions):
        path: Path = ("actions", index)
        if action.do == "abort" and action.request is None:
            yield path, "it is not said which request is to be aborted; add “request”"
        elif action.do != "abort" and action.request is not None:
            yield (*path, "request"), f"{action.do} concerns no single request; leave “request” out"
        elif action.request is not None:
            yield from _request_id(scenario, (*path, "request"), action.request)
        if action.do in _WITH_BLOCKS and not action.block_ids:
            yield path, f"it is not said which blocks {_WITH_BLOCKS[action.do]}; add “block_ids”, as in block_ids: [3]"
        elif action.do not in _WITH_BLOCKS and action.block_ids:
            yield (*path, "block_ids"), f"{action.do} concerns no single blocks; leave “block_ids” out"
        yield from _block_ids(scenario, (*path, "block_ids"), action.block_ids)


def _selector(scenario: Scenario, path: Path, at: Selector) -> Iterator[tuple[Path, str]]:
    if at.kind not in SELECTOR_KINDS:
        yield (*path, "kind"), f"there is no event of the kind “{at.kind}”; {did_you_mean(at.kind, SELECTOR_KINDS)}"
    if at.nth == 0:
        yield (*path, "nth"), "events are counted from 1 (and from -1 at the end); there is no 0th"
    if at.kind in POINT_KINDS and (at.request is not None or at.step is not None or at.nth != 1):
        yield path, f"“{at.kind}” is a single frame; leave request, nth and step out"
    if at.request is not None:
        yield from _request_id(scenario, (*path, "request"), at.request, "either")
    count = num_groups(scenario) if at.group is not None else 0
    if at.group is not None and count is not None and at.group >= count:
        yield (*path, "group"), f"there is no group {at.group}; {'the only group is 0' if count == 1 else f'the groups are 0 to {count - 1}'}"


def _expectation(scenario: Scenario, path: Path, expectation: Expectation) -> Iterator[tuple[Path, str]]:
    facts = expectation.facts
    if not facts:
        yield path, "nothing is expected here; add a fact such as “free_queue: [1, 2]”, or take the entry out"
    for name, value in facts.items():
        here: Path = (*path, name)
        if name in _BY_REQUEST:
            for request_id in value:
                yield from _request_id(scenario, (*here, request_id), request_id, "sequence")
        elif name in _LISTS_OF_REQUESTS:
            for index, request_id in enumerate(value):
                yield from _request_id(scenario, (*here, index), request_id, "request" if name in _WHOLE_REQUESTS else "sequence")
        elif name in _BY_BLOCK:
            for block_id in value:
                yield from _block_ids(scenario, (*here, block_id), [block_id])
        elif name in _LISTS_OF_BLOCKS:
            yield from _block_ids(scenario, here, value)
        elif name == "count":
            for kind in value:
                if kind not in _EVENTS:
                    yield (*here, kind), f"there is no event of the kind “{kind}”; {did_you_mean(kind, _EVENTS)}"
        elif name == "cause" and value not in [c.value for c in CauseKind]:
            yield here, f"there is no cause of the kind “{value}”; {did_you_mean(value, [c.value for c in CauseKind])}"
    for name in _TABLES:
        yield from _block_tables(scenario, path, expectation, name)
    statuses = _STATUSES if scenario.engine == "v1" else PAPER_STATUSES
    for request_id, status in (expectation.status or {}).items():
        if status not in statuses:
            yield (*path, "status", request_id), f"there is no status “{status}”; {did_you_mean(status, statuses)}"
    yield from paper_facts(scenario, path, expectation)
    yield from _event_facts(path, expectation)


def _block_tables(scenario: Scenario, path: Path, expectation: Expectation, name: str) -> Iterator[tuple[Path, str]]:
    tables = getattr(expectation, name) or {}
    count = num_groups(scenario) if tables else 1
    for request_id, table in tables.items():
        here: Path = (*path, name, request_id)
        nested = bool(table) and isinstance(table[0], list)
        if expectation.at.group is not None and nested:
            yield here, f"“at” names group {expectation.at.group}, so this is one list, as in [1, 2]; write that group's table alone, or leave the group out"
        elif count is None:
            pass  # the model is not here, so nobody knows its groups
        elif expectation.at.group is None and nested != (count > 1):
            shape = "[1, 2]" if count == 1 else str([[n] for n in range(1, count + 1)])
            yield here, f"there {'is 1 group' if count == 1 else f'are {count} groups'}; write the table as in {shape}"
        elif nested and len(table) != count:
            yield here, f"there are {count} groups, but {len(table)} lists; write one list per group, [] for an empty table"
        yield from _block_ids(scenario, here, [b for row in table for b in (row if isinstance(row, list) else [row])])


def _event_facts(path: Path, expectation: Expectation) -> Iterator[tuple[Path, str]]:
    kind = expectation.at.kind
    given = [(name, (*path, name)) for name in _EVENT_FACTS if getattr(expectation, name) is not None]
    given += [(name, (*path, "event", name)) for name in expectation.event or {}]
    if kind in POINT_KINDS:
        for name, place in given:
            yield place, f"“{kind}” is a frame and not an event, so it has no {name}; select an event"
    elif kind in _EVENTS:
        fields = [f for f in _EVENTS[kind].__struct_fields__ if f != "cause"]
        for name, place in given:
            if name not in fields:
                yield place, f"the event {kind} has no field “{name}”; its fields are {', '.join(fields)}"


def _request_id(scenario: Scenario, path: Path, request_id: str, what: Literal["request", "sequence", "either"] = "request") -> Iterator[tuple[Path, str]]:
    if scenario.engine == "paper":
        problem = name_problem(scenario, request_id, what)
        if problem is not None:
            yield path, problem
        return
    ids = [r.id for r in scenario.requests]
    if request_id not in ids:
        yield path, f"there is no request “{request_id}”; {did_you_mean(request_id, ids)}"


def _block_ids(scenario: Scenario, path: Path, block_ids: list[int]) -> Iterator[tuple[Path, str]]:
    unknown = [str(b) for b in block_ids if not 0 <= b < scenario.config.num_blocks]
    if unknown:
        what = f"is no block {unknown[0]}" if len(unknown) == 1 else f"are no blocks {', '.join(unknown)}"
        yield path, f"there {what}; the pool has the blocks 0 to {scenario.config.num_blocks - 1}"
