"""What belongs to which engine, and what sequence groups, beams and prefixes must have to do with each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel

from engine.paper.sequence import SequenceStatus
from scenarios.messages import did_you_mean
from scenarios.model_groups import has_states
from scenarios.problems import Path
from scenarios.schema import Expectation, RequestPart, Scenario

PAPER_STATUSES = tuple(status.name for status in SequenceStatus)

_V1_CONFIG = (
    *("enable_prefix_caching", "prefix_caching_hash_algo", "long_prefill_token_threshold", "scheduler_reserve_full_isl", "policy", "kv_cache_groups"),
    *("hash_block_size", "scheduler_block_size", "prefix_match_unit", "retention_interval", "use_eagle", "async_scheduling", "compat"),
    *("decode_context_parallel_size", "dcp_rank", "cp_kv_cache_interleave_size", "sliding_window", "clear_rows"),
    "mamba_cache_mode",
)
_V1_REQUEST = ("cache_salt", "lora_name", "lora_int_id", "mm_features", "priority")
_V1_ACTIONS = ("reset_prefix_cache", "evict_blocks")
_V1_FACTS = ("hashed", "hash_names", "num_state_tokens", "num_cached_block", "hash_map_size", "page_size_bytes", "num_hit_tokens")
_PAPER_CONFIG = ("num_cpu_blocks", "preemption_mode")
_PAPER_REQUEST = ("n", "beam_width", "length_penalty", "prefix", "force_samples", "force_beams")
_PAPER_FACTS = ("cpu_block_table", "cpu_ref_cnt", "cpu_block_tokens", "cpu_free_queue", "swapped", "parents")
_WITHOUT_MEANING = ("enable_prefix_caching",)
"""Fields that mean something even where they say what goes without saying."""

_Found = Iterator[tuple[Path, str]]


def several_sequences(request: RequestPart) -> bool:
    """Whether its sequences are called by its id and a number, as in A1, A2."""
    return request.n > 1 or request.beam_width is not None


def check_engine(scenario: Scenario) -> _Found:
    """Places and sentences for everything that the scenario's engine does not know, and for groups, beams and prefixes that cannot be."""
    if scenario.engine == "v1":
        yield from _only("the paper's engine", "paper", scenario, _PAPER_CONFIG, _PAPER_REQUEST, (), _PAPER_FACTS)
        if scenario.prefixes:
            yield ("prefixes",), _belongs("prefixes", "the paper's engine", "paper")
        return
    yield from _only("vLLM V1", "v1", scenario, _V1_CONFIG, _V1_REQUEST, _V1_ACTIONS, _V1_FACTS)
    if scenario.opens is not None:
        yield ("opens",), _belongs("opens", "vLLM V1", "v1")
    if has_states(scenario.model):
        yield ("model",), f"{scenario.model} has layers with a recurrent state, which the paper's engine does not know; take tiny, or set “engine” to v1"
    yield from _prefixes(scenario)
    yield from _names(scenario)
    yield from _aborts(scenario)
    for index, request in enumerate(scenario.requests):
        path: Path = ("requests", index)
        yield from _group(scenario, path, request)
        yield from _forced_samples(scenario, path, request)
        yield from _forced_beams(scenario, path, request)


def _belongs(name: str, owner: str, engine: str) -> str:
    return f"“{name}” belongs to {owner}; leave it out, or set “engine” to {engine}"


def _only(
    owner: str, engine: str, scenario: Scenario, config: tuple[str, ...], request: tuple[str, ...], actions: tuple[str, ...], facts: tuple[str, ...]
) -> _Found:
    """What only the other engine knows. A setting that says what goes without saying does no harm."""
    for name in config:
        if name in scenario.config.model_fields_set and _says_something(scenario.config, name):
            yield ("config", name), _belongs(name, owner, engine)
    for index, part in enumerate(scenario.requests):
        for name in request:
            if name in part.model_fields_set and _says_something(part, name):
                yield ("requests", index, name), _belongs(name, owner, engine)
    for index, action in enumerate(scenario.actions):
        if action.do in actions:
            yield ("actions", index, "do"), _belongs(action.do, owner, engine)
    for index, expectation in enumerate(scenario.expect):
        for name in facts:
            if getattr(expectation, name) is not None:
                yield ("expect", index, name), _belongs(name, owner, engine)


def _says_something(part: BaseModel, name: str) -> bool:
    return name in _WITHOUT_MEANING or getattr(part, name) != type(part).model_fields[name].get_default(call_default_factory=True)


# ------------------------------------------------------------------ prefixes and names
def _prefixes(scenario: Scenario) -> _Found:
    seen: dict[str, str] = {request.id: f"requests[{index}]" for index, request in reversed([*enumerate(scenario.requests)])}
    for index, prefix in enumerate(scenario.prefixes):
        path: Path = ("prefixes", index)
        if prefix.id in seen:
            yield (*path, "id"), f"the id “{prefix.id}” is used twice, first by {seen[prefix.id]}; give each prefix its own"
        seen.setdefault(prefix.id, f"prefixes[{index}]")
        if prefix.prompt is None and prefix.prompt_token_ids is None:
            yield path, "this prefix has no prompt; give it a “prompt” (a text) or “prompt_token_ids” (a list of numbers)"
        if prefix.prompt is not None and prefix.prompt_token_ids is not None:
            yield path, "this prefix has a prompt and prompt_token_ids; keep one of them"
    ids = [prefix.id for prefix in scenario.prefixes]
    for index, request in enumerate(scenario.requests):
        if request.prefix is not None and request.prefix not in ids:
            hint = did_you_mean(request.prefix, ids) if ids else "describe it under “prefixes”"
            yield ("requests", index, "prefix"), f"there is no prefix “{request.prefix}”; {hint}"


def _aborts(scenario: Scenario) -> _Found:
    """A prefix stays for ever, and nobody is aborted before he is there."""
    arrivals = {request.id: request.arrives_at_step for request in scenario.requests}
    prefixes = [prefix.id for prefix in scenario.prefixes]
    for index, action in enumerate(scenario.actions):
        if action.do != "abort" or action.request is None:
            continue
        if action.request in prefixes and action.request not in arrivals:
            yield ("actions", index, "request"), f"{action.request} is a prefix, which its provider keeps; abort a request that begins with it"
        arrival = arrivals.get(action.request, 1)
        if action.at_step < arrival:
            yield ("actions", index, "at_step"), f"this is {action.at_step}, but {action.request} arrives at step {arrival}; give {arrival} or more"


def _names(scenario: Scenario) -> _Found:
    """No request may be called like another one's sequence."""
    parts = [*((("requests", index), part.id) for index, part in enumerate(scenario.requests))]
    parts += [(("prefixes", index), prefix.id) for index, prefix in enumerate(scenario.prefixes)]
    for path, name in parts:
        request = _request_of_sequence(scenario, name)
        if request is not None:
            yield (*path, "id"), f"“{name}” is what a sequence of request {request.id} is called; give it another id"


def _request_of_sequence(scenario: Scenario, name: str) -> RequestPart | None:
    for request in scenario.requests:
        number = name.removeprefix(request.id)
        if not several_sequences(request) or not name.startswith(request.id) or not number.isascii() or not number.isdigit() or number.startswith("0"):
            continue
        if request.beam_width is not None or int(number) <= request.n:  # beams are born without end
            return request
    return None


def name_problem(scenario: Scenario, name: str, what: Literal["request", "sequence", "either"]) -> str | None:
    """What is wrong with a name where the paper's engine has `what`, None when nothing is. A request with one sequence, and a prefix, is both."""
    ids = [*(request.id for request in scenario.requests), *(prefix.id for prefix in scenario.prefixes)]
    request = next((part for part in scenario.requests if part.id == name), None)
    if request is not None and several_sequences(request) and what == "sequence":
        return f"request {name} has several sequences; name one of them, as in {name}1"
    if name in ids:
        return None
    owner = _request_of_sequence(scenario, name)
    if owner is None:
        return f"there is no request or sequence “{name}”; {did_you_mean(name, ids)}"
    return f"{name} is a sequence, and whole requests stand here; write {owner.id}" if what == "request" else None


# ------------------------------------------------------------------ samples and beams
def _group(scenario: Scenario, path: Path, request: RequestPart) -> _Found:
    config, width = scenario.config, request.beam_width
    if width is None and "length_penalty" in request.model_fields_set and request.length_penalty != 1.0:
        yield (*path, "length_penalty"), "a length penalty ranks finished beams; add “beam_width”, or leave it out"
    if width is not None and request.temperature:
        yield (*path, "temperature"), "beam search takes the most probable candidates and draws nothing; leave “temperature” out"
    if width is not None and request.n > width:
        yield (*path, "n"), f"this is {request.n}, but a beam search of width {width} cannot return more than {width}; lower it or raise beam_width"
    field, number = ("beam_width", width) if width is not None else ("n", request.n)
    if number > config.max_num_seqs:
        yield (*path, field), f"this is {number}, but max_num_seqs is {config.max_num_seqs}, and they run together; raise it or give a smaller number"
    elif number > config.max_num_batched_tokens:
        message = f"this is {number}, but max_num_batched_tokens is {config.max_num_batched_tokens}, and each computes a token"
        yield (*path, field), f"{message}; raise it or give a smaller number"
    given = [name for name in ("force", "force_samples", "force_beams") if getattr(request, name)]
    if len(given) > 1:
        yield (*path, given[1]), f"this request has {' and '.join(given)}; keep one of them"
    elif given == ["force"] and several_sequences(request):
        yield (*path, "force"), f"this request has several sequences; dictate them with “{'force_beams' if width is not None else 'force_samples'}”"


def _forced_samples(scenario: Scenario, path: Path, request: RequestPart) -> _Found:
    here: Path = (*path, "force_samples")
    limit, samples = request.output_limit, request.force_samples
    if samples and request.beam_width is not None:
        yield here, "a beam search has no samples; name the survivors of each iteration in “force_beams”"
        return
    if len(samples) > request.n:
        yield here, f"{len(samples)} samples are forced, but n is {request.n}; raise it or force fewer"
    for index, sample in enumerate(samples):
        if len(sample) > limit:
            yield (*here, index), f"{len(sample)} outputs are forced, but max_tokens is {limit}; raise it or force fewer"
    if scenario.model != "none" or request.beam_width is not None or request.force or (request.n == 1 and not samples):
        return
    for index in range(request.n):
        there = len(samples[index]) if index < len(samples) else 0
        if there < limit:
            place = (*here, index) if index < len(samples) else here if samples else path
            what = f"without a model every output must be forced: {there} of {limit} are for sample {index + 1}"
            yield place, f"{what}; force the rest in “force_samples”, or name a model"


def _forced_beams(scenario: Scenario, path: Path, request: RequestPart) -> _Found:
    here: Path = (*path, "force_beams")
    limit, selections, width = request.output_limit, request.force_beams, request.beam_width
    if selections and width is None:
        yield here, "this request searches no beams; add “beam_width”, or dictate its outputs with “force”"
    if width is None:
        return
    if len(selections) > limit:
        yield here, f"{len(selections)} iterations are forced, but max_tokens is {limit}; raise it or force fewer"
    living = 1
    for index, selection in enumerate(selections):
        if not 1 <= len(selection) <= width:
            yield (*here, index), f"{len(selection)} survivors are named, but beam_width is {width}; name 1 to {width}"
        for rank, choice in enumerate(selection):
            if choice.parent >= living:
                beams = "only beam 0, the prompt," if living == 1 else f"the beams 0 to {living - 1}"
                yield (*here, index, rank, "parent"), f"there is no living beam {choice.parent}; {beams} can be followed here"
        pairs = [(choice.parent, choice.token) for choice in selection]
        for rank, pair in enumerate(pairs):
            if pair in pairs[:rank]:
                yield (*here, index, rank), "the same token after the same parent is named twice; a beam can go on with it only once"
        living = max(len(selection), 1)
    if scenario.model == "none" and len(selections) < limit:
        place = here if selections else path
        what = f"without a model every output must be forced: the survivors of {len(selections)} of {limit} iterations are"
        yield place, f"{what}; name the rest in “force_beams”, or name a model"


def paper_facts(scenario: Scenario, path: Path, expectation: Expectation) -> _Found:
    """Blocks and parents that an expectation names and that cannot be there."""
    named: list[tuple[Path, int]] = [((*path, "cpu_free_queue"), b) for b in expectation.cpu_free_queue or ()]
    named += [((*path, "cpu_block_table", name), b) for name, table in (expectation.cpu_block_table or {}).items() for b in table]
    for field in ("cpu_ref_cnt", "cpu_block_tokens"):
        named += [((*path, field, b), b) for b in getattr(expectation, field) or ()]
    size = scenario.config.num_cpu_blocks
    for place, block_id in named:
        if not 0 <= block_id < size:
            space = f"it has the blocks 0 to {size - 1}" if size else "num_cpu_blocks is 0, so there is none"
            yield place, f"there is no block {block_id} in the swap space; {space}"
    for name, parent in (expectation.parents or {}).items():
        problem = None if parent is None else name_problem(scenario, parent, "sequence")
        if problem is not None:
            yield (*path, "parents", name), problem
