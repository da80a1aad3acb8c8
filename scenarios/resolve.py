"""Turns the texts of a scenario into token ids, and refuses what the chosen model or the pool can never serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.core.block_hash import MultiModalFeature
from engine.core.kv_cache_spec import FullAttentionSpec, RSWASpec
from engine.core.output import SamplingParams
from engine.model_groups import with_groups_of_model
from engine.models import Tokenizer
from engine.session import ActionSpec, GroupConfig, RequestSpec, SessionConfig
from scenarios.messages import shown
from scenarios.problems import Path, Problem, ScenarioError
from scenarios.schema import MAX_REQUESTS, Config, PrefixPart, RequestPart, Scenario

MAX_FRAMES = 20_000
MAX_BLOCK_STATES = 8_000_000
"""Blocks × frames of a run: about 64 MB and half a minute. Past that the recorder stops with a frame that says so."""


def session_config(scenario: Scenario, num_positions: int | None) -> SessionConfig:
    """The scenario's settings as the session takes them. `num_positions`: how many the model has, None without one; a pool that could hold longer
    requests than that is no reason to run out of positions, so they become `max_model_len` (as vLLM derives it from the model)."""
    config = scenario.config
    max_model_len = config.max_model_len
    if max_model_len is None and num_positions is not None and num_positions < (config.num_blocks - 1) * config.block_size:
        max_model_len = num_positions
    return SessionConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        hash_algo=config.prefix_caching_hash_algo,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
        policy=config.policy,
        free_queue_order=tuple(config.free_queue_order),
        seed=config.seed,
        max_frames=min(MAX_FRAMES, MAX_BLOCK_STATES // config.num_blocks),
        kv_cache_groups=group_configs(config),
        sliding_window=config.sliding_window,
        mamba_cache_mode=config.mamba_cache_mode,
        hash_block_size=config.hash_block_size,
        scheduler_block_size=config.scheduler_block_size,
        prefix_match_unit=config.prefix_match_unit,
        retention_interval=config.retention_interval,
        use_eagle=config.use_eagle,
        async_scheduling=config.async_scheduling,
        compat=config.compat,
        decode_context_parallel_size=config.decode_context_parallel_size,
        dcp_rank=config.dcp_rank,
        cp_kv_cache_interleave_size=config.cp_kv_cache_interleave_size,
        attention_shares=config.attention_shares,
        kernel_witness=config.kernel_witness,
        clear_rows=config.clear_rows,
    )


def group_configs(config: Config) -> tuple[GroupConfig, ...]:
    """The groups as the session takes them."""
    return tuple(GroupConfig(**{**group.model_dump(), "layer_names": tuple(group.layer_names)}) for group in config.kv_cache_groups)


def action_specs(scenario: Scenario) -> tuple[ActionSpec, ...]:
    """The scenario's actions as the session takes them."""
    return tuple(ActionSpec(a.at_step, a.do, a.request, tuple(a.block_ids)) for a in scenario.actions)


def request_specs(scenario: Scenario, tokenizer: Tokenizer, model: str, num_positions: int | None) -> tuple[RequestSpec, ...]:
    """The scenario's requests with token ids of `model`, which has `num_positions` positions (None: as many as one likes).

    Raises ScenarioError with everything that this model or the pool cannot serve: a token outside the vocabulary, a forced text that is not exactly
    one token, a request that is longer than the pool, than `max_model_len` or than the model.
    """
    problems: list[Problem] = []
    limit = scenario.config.max_model_len
    if limit is not None and num_positions is not None and limit > num_positions:
        message = f"this is {limit}, but {model} has {num_positions} positions; give {num_positions} or less"
        problems.append(scenario.origin.problem(("config", "max_model_len"), message))
    specs: list[RequestSpec] = []
    for index, request in enumerate(scenario.requests):
        path: Path = ("requests", index)
        prompt, found = prompt_tokens(request, index, path, tokenizer, model)
        forced, more = forced_tokens(request.force, (*path, "force"), tokenizer, model)
        found += more
        if not found:
            found += _length(scenario, request, path, len(prompt), model, num_positions)
        problems += [scenario.origin.problem(place, message) for place, message in found]
        specs.append(
            RequestSpec(
                request_id=request.id,
                prompt_token_ids=tuple(prompt),
                sampling_params=SamplingParams(
                    max_tokens=request.output_limit,
                    temperature=request.temperature,
                    seed=scenario.config.seed if request.seed is None else request.seed,
                    stop_token_ids=() if request.ignore_eos else tuple(tokenizer.stop_token_ids),
                    forced_token_ids=tuple(forced),
                ),
                arrival_step=request.arrives_at_step,
                cache_salt=request.cache_salt,
                lora_name=request.lora_name,
                lora_int_id=request.lora_int_id,
                mm_features=tuple(MultiModalFeature(item.identifier, item.offset, item.length) for item in request.mm_features),
                priority=request.priority,
            )
        )
    if problems:
        raise ScenarioError(problems)
    return tuple(specs)


Found = list[tuple[Path, str]]
"""Places and what is wrong there."""


def tokens_without_meaning(num_tokens: int, index: int, tokenizer: Tokenizer) -> list[int]:
    """`num_tokens` token ids for the prompt of the scenario's request number `index` (0 to 255): every plain token of the vocabulary in turn, from a place that
    no other request begins at, so that no two such prompts share a block. Stop tokens are left out."""
    plain = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.stop_token_ids]
    first = index * max(len(plain) // MAX_REQUESTS, 1)
    return [plain[(first + position) % len(plain)] for position in range(num_tokens)]


def text_tokens(part: RequestPart | PrefixPart, tokenizer: Tokenizer) -> list[int]:
    """The token ids of the prompt's text. Only one that begins a sequence gets what the model expects in front."""
    follows_prefix = isinstance(part, RequestPart) and part.prefix is not None
    return tokenizer.encode(part.prompt or "") if follows_prefix else tokenizer.encode_prompt(part.prompt or "")


def prompt_tokens(request: RequestPart | PrefixPart, index: int, path: Path, tokenizer: Tokenizer, model: str) -> tuple[list[int], Found]:
    """The token ids of the prompt of a request (number `index` of the scenario, at `path`) or of a prefix, and what is wrong with it."""
    if request.prompt is not None:
        token_ids = text_tokens(request, tokenizer)
        return token_ids, [] if token_ids else [((*path, "prompt"), f"this text has no token for {model}; write at least one word")]
    if isinstance(request, RequestPart) and request.prompt_length is not None:
        return tokens_without_meaning(request.prompt_length, index, tokenizer), []
    token_ids = list(request.prompt_token_ids or ())
    return token_ids, list(_outside(token_ids, (*path, "prompt_token_ids"), tokenizer, model))


def forced_tokens(references: Sequence[str | int], path: Path, tokenizer: Tokenizer, model: str) -> tuple[list[int], Found]:
    """The token ids of dictated outputs, each the text of exactly one token or its id, at `path` in the scenario, and what is wrong with them."""
    token_ids: list[int] = []
    found: Found = []
    for index, reference in enumerate(references):
        token_id, problems = forced_token(reference, (*path, index), tokenizer, model)
        found += problems
        if token_id is not None:
            token_ids.append(token_id)
    return token_ids, found


def forced_token(reference: str | int, place: Path, tokenizer: Tokenizer, model: str) -> tuple[int | None, Found]:
    """One dictated token, None where the text is not exactly one."""
    if isinstance(reference, int):
        return reference, list(_outside([reference], place, tokenizer, model, whole=True))
    pieces = tokenizer.encode(reference)
    if len(pieces) == 1:
        return pieces[0], []
    other = reference[1:] if reference.startswith(" ") else f" {reference}"
    texts = ", ".join(f"“{tokenizer.token_text(t)}”" for t in pieces) or "none"
    near = len(tokenizer.encode(other)) == 1
    mend = f"write “{other}”, which is one" if near else "force them one by one, or take another word"
    return None, [(place, f"{shown(reference)} is {len(pieces)} tokens of {model} ({texts}) and must be exactly 1; {mend}")]


def prompt_field(request: RequestPart | PrefixPart) -> str:
    """The field that a request's or a prefix's prompt comes from."""
    return next((name for name in ("prompt", "prompt_length") if getattr(request, name, None) is not None), "prompt_token_ids")


def _outside(token_ids: list[int], path: Path, tokenizer: Tokenizer, model: str, *, whole: bool = False) -> Iterator[tuple[Path, str]]:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            place = path if whole else (*path, index)
            yield place, f"there is no token {token_id}; the vocabulary of {model} goes from 0 to {tokenizer.vocab_size - 1}"


def _length(scenario: Scenario, request: RequestPart, path: Path, num_prompt_tokens: int, model: str, num_positions: int | None) -> Found:
    config = scenario.config
    field = prompt_field(request)
    limit = config.max_model_len
    if limit is not None and num_prompt_tokens >= limit:
        message = f"the prompt has {num_prompt_tokens} tokens, but with max_model_len {limit} at most {limit - 1} can be followed by an output"
        return [((*path, field), f"{message}; shorten it or raise max_model_len")]
    found = _blocks(scenario, model, path, field, num_prompt_tokens, "a prompt of {tokens} tokens needs")
    if found:
        return found
    num_tokens = num_prompt_tokens + request.output_limit
    if limit is None and num_positions is not None and num_tokens > num_positions:
        message = f"{num_prompt_tokens} prompt tokens and {request.output_limit} outputs are {num_tokens} tokens, but {model} has {num_positions} positions"
        return [((*path, field), f"{message}; shorten the prompt or lower max_tokens")]
    num_tokens = num_tokens if limit is None else min(num_tokens, limit)
    what = f"{num_prompt_tokens} prompt tokens and {request.output_limit} outputs need"
    return _blocks(scenario, model, path, "max_tokens" if request.max_tokens is not None else None, num_tokens, what)


def _blocks(scenario: Scenario, model: str, path: Path, field: str | None, num_tokens: int, what: str) -> Found:
    """What there is to say when `num_tokens` tokens of one request cannot lie in the pool at the same time. Groups that let blocks go while they grow
    are left to the engine."""
    config = scenario.config
    usable = config.num_blocks - 1
    specs = [group.kv_cache_spec for group in with_groups_of_model(session_config(scenario, None), model).group_specs()]
    staying = [spec for spec in specs if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec)]
    sizes = [spec.block_size * config.decode_context_parallel_size for spec in staying]
    needed = sum(-(-num_tokens // size) for size in sizes)
    if needed <= usable:
        return []
    pool = f"the pool has {usable} usable {'block' if usable == 1 else 'blocks'} (num_blocks {config.num_blocks} less the null block 0)"
    blocks = f"{needed} blocks of {sizes[0]}" if len(sizes) == 1 else f"{needed} blocks in {len(sizes)} groups"
    mend = "shorten it" if field not in ("max_tokens", None) else "lower max_tokens"
    place: Path = path if field is None else (*path, field)
    return [(place, f"{what.format(tokens=num_tokens)} {blocks}, but {pool}; {mend} or set num_blocks to {needed + 1} or more")]
