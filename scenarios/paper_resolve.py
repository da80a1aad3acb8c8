"""Turns a scenario of the paper's engine into its settings and requests, and refuses what the chosen model or the pool can never serve."""

from __future__ import annotations

from engine.models import Tokenizer
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.request_check import num_blocks_at_least
from scenarios.problems import Path, ScenarioError
from scenarios.resolve import MAX_BLOCK_STATES, MAX_FRAMES, Found, forced_token, forced_tokens, prompt_field, prompt_tokens
from scenarios.schema import PrefixPart, RequestPart, Scenario


def paper_config(scenario: Scenario, num_positions: int | None) -> PaperConfig:
    """The scenario's settings as the paper's session takes them. `num_positions`: how many the model has, None without one (see `session_config`)."""
    config = scenario.config
    max_model_len = config.max_model_len
    if max_model_len is None and num_positions is not None and num_positions < config.num_blocks * config.block_size:
        max_model_len = num_positions
    return PaperConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_cpu_blocks=config.num_cpu_blocks,
        preemption_mode=config.preemption_mode,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        watermark=config.watermark,
        free_queue_order=tuple(config.free_queue_order),
        attention_shares=config.attention_shares,
        kernel_witness=config.kernel_witness,
        seed=config.seed,
        max_frames=min(MAX_FRAMES, MAX_BLOCK_STATES // (config.num_blocks + config.num_cpu_blocks)),
    )


def paper_request_specs(scenario: Scenario, tokenizer: Tokenizer, model: str, num_positions: int | None) -> tuple[PaperRequestSpec, ...]:
    """The scenario's prefixes, then its requests, with token ids of `model`, which has `num_positions` positions (None: as many as one likes). Prefix and
    prompt are read each for itself, so that a request begins with exactly the prefix's tokens.

    Raises ScenarioError with everything that this model or the pool cannot serve: a token outside the vocabulary, a forced text that is not exactly
    one token, more beams than tokens, a prompt that fits into no iteration, a request that is longer than the pool, than `max_model_len` or than the model.
    """
    resolver = _Resolver(scenario, tokenizer, model, num_positions)
    specs = [*map(resolver.prefix, range(len(scenario.prefixes))), *map(resolver.request, range(len(scenario.requests)))]
    if resolver.found:
        raise ScenarioError([scenario.origin.problem(place, message) for place, message in resolver.found])
    return tuple(spec for spec in specs if spec is not None)


class _Resolver:
    """Resolves part after part; what is wrong gathers in `found`."""

    def __init__(self, scenario: Scenario, tokenizer: Tokenizer, model: str, num_positions: int | None) -> None:
        self.found: Found = []
        self._scenario = scenario
        self._tokenizer = tokenizer
        self._model = model
        self._num_positions = num_positions
        self._prefixes: dict[str, list[int]] = {}
        limit = scenario.config.max_model_len
        if limit is not None and num_positions is not None and limit > num_positions:
            message = f"this is {limit}, but {model} has {num_positions} positions; give {num_positions} or less"
            self.found.append((("config", "max_model_len"), message))

    def prefix(self, index: int) -> PaperRequestSpec | None:
        part, path = self._scenario.prefixes[index], ("prefixes", index)
        token_ids, found = prompt_tokens(part, index, path, self._tokenizer, self._model)
        self._prefixes[part.id] = token_ids
        found = found or self._fits_in_step(part, path, len(token_ids), "prefix") or self._prefix_blocks(part, path, len(token_ids))
        self.found += found
        return None if found else PaperRequestSpec(part.id, tuple(token_ids), max_tokens=0, is_prefix=True)

    def request(self, index: int) -> PaperRequestSpec | None:
        part = self._scenario.requests[index]
        path: Path = ("requests", index)
        own, found = prompt_tokens(part, index, path, self._tokenizer, self._model)
        forced, beams = self._forced(part, path, found), self._beams(part, path, found)
        found += self._beam_width(part, path)
        prefix = self._prefixes.get(part.prefix, []) if part.prefix is not None else []
        self.found += found
        if found:
            return None
        spec = PaperRequestSpec(
            request_id=part.id,
            prompt_token_ids=(*prefix, *own),
            arrival_step=part.arrives_at_step,
            max_tokens=part.output_limit,
            n=part.n,
            beam_width=part.beam_width,
            length_penalty=part.length_penalty,
            temperature=part.temperature,
            seed=self._scenario.config.seed if part.seed is None else part.seed,
            stop_token_ids=() if part.ignore_eos else tuple(self._tokenizer.stop_token_ids),
            forced_token_ids=forced,
            forced_beams=beams,
            prefix_id=part.prefix,
        )
        self.found += (
            _stopped_beams(path, spec)
            or self._fits_in_step(part, path, len(own), "prompt")
            or self._length(part, path, spec)
            or self._pool_holds(part, path, spec, len(prefix))
        )
        return spec

    # ------------------------------------------------------------------ dictated outputs
    def _forced(self, part: RequestPart, path: Path, found: Found) -> tuple[tuple[int, ...], ...]:
        places = [((*path, "force"), part.force)] if part.force else [((*path, "force_samples", i), s) for i, s in enumerate(part.force_samples)]
        samples: list[tuple[int, ...]] = []
        for place, references in places:
            token_ids, problems = forced_tokens(references, place, self._tokenizer, self._model)
            samples.append(tuple(token_ids))
            found += problems
        return tuple(samples)

    def _beams(self, part: RequestPart, path: Path, found: Found) -> tuple[tuple[tuple[int, int], ...], ...]:
        selections: list[tuple[tuple[int, int], ...]] = []
        for index, selection in enumerate(part.force_beams):
            chosen: list[tuple[int, int]] = []
            for rank, choice in enumerate(selection):
                place = (*path, "force_beams", index, rank, "token")
                token_id, problems = forced_token(choice.token, place, self._tokenizer, self._model)
                found += problems
                if token_id is not None:
                    chosen.append((choice.parent, token_id))
            selections.append(tuple(chosen))
        return tuple(selections)

    def _beam_width(self, part: RequestPart, path: Path) -> Found:
        width, size = part.beam_width, self._tokenizer.vocab_size
        if width is None or width <= size:
            return []
        return [((*path, "beam_width"), f"this is {width}, but the vocabulary of {self._model} has {size} tokens to go on with; give {size} or less")]

    # ------------------------------------------------------------------ lengths
    def _fits_in_step(self, part: RequestPart | PrefixPart, path: Path, num_tokens: int, what: str) -> Found:
        budget = self._scenario.config.max_num_batched_tokens
        if num_tokens <= budget:
            return []
        message = f"a {what} is computed in one piece, and this one has {num_tokens} tokens, but max_num_batched_tokens is {budget}"
        return [((*path, prompt_field(part)), f"{message}; shorten it or raise max_num_batched_tokens to {num_tokens} or more")]

    def _prefix_blocks(self, part: PrefixPart, path: Path, num_tokens: int) -> Found:
        config, needed = self._scenario.config, self._blocks(num_tokens)
        kept = self._num_kept_blocks() - needed
        if kept + needed < config.num_blocks:
            return []
        message = f"a prefix of {num_tokens} tokens needs {_count(needed)} of {config.block_size} for ever, but {self._pool(kept)}, and requests need some too"
        return [((*path, prompt_field(part)), f"{message}; shorten it or set num_blocks to more than {kept + needed}")]

    def _length(self, part: RequestPart, path: Path, spec: PaperRequestSpec) -> Found:
        num_prompt_tokens, limit, field = len(spec.prompt_token_ids), self._scenario.config.max_model_len, prompt_field(part)
        if limit is not None and num_prompt_tokens >= limit:
            message = f"the prompt has {num_prompt_tokens} tokens, but with max_model_len {limit} at most {limit - 1} can be followed by an output"
            return [((*path, field), f"{message}; shorten it or raise max_model_len")]
        num_tokens = num_prompt_tokens + spec.max_tokens
        if limit is None and self._num_positions is not None and num_tokens > self._num_positions:
            message = f"{num_prompt_tokens} prompt tokens and {spec.max_tokens} outputs are {num_tokens} tokens, but {self._model} has {self._num_positions}"
            return [((*path, field), f"{message} positions; shorten the prompt or lower max_tokens")]
        return []

    def _pool_holds(self, part: RequestPart, path: Path, spec: PaperRequestSpec, num_prefix_tokens: int) -> Found:
        """Whether the request can get to its end when it is alone with the prefixes. Samples share the full blocks of the prompt; how much beams share is
        known only when they are chosen."""
        config = paper_config(self._scenario, self._num_positions)
        kept = self._num_kept_blocks()
        usable = config.num_blocks - kept
        if usable < 1:
            return []  # said of the prefixes already
        shared, num_prompt_tokens = num_prefix_tokens // config.block_size, len(spec.prompt_token_ids)
        needed = self._blocks(num_prompt_tokens) - shared
        if needed > usable:
            what = f"a prompt of {num_prompt_tokens} tokens needs {_count(needed)} of {config.block_size}"
            mend = f"shorten it or set num_blocks to {needed + kept} or more"
            return [((*path, prompt_field(part)), f"{what}{_besides(shared)}, but {self._pool(kept)}; {mend}")]
        needed = num_blocks_at_least(spec, config, num_prefix_tokens)
        if needed <= usable:
            return []
        several = f" of each of {spec.beam_width} beams" if spec.beam_width is not None else f" of each of {spec.n} samples" if spec.n > 1 else ""
        number = f"{'at least ' if spec.beam_width is not None else ''}{_count(needed)} of {config.block_size}"
        what = f"{num_prompt_tokens} prompt tokens and {spec.max_tokens} outputs{several} need {number}{_besides(shared)}"
        place = (*path, "max_tokens") if part.max_tokens is not None else path
        return [(place, f"{what}, but {self._pool(kept)}; lower max_tokens or set num_blocks to {needed + kept} or more")]

    def _num_kept_blocks(self) -> int:
        return sum(self._blocks(len(token_ids)) for token_ids in self._prefixes.values())

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._scenario.config.block_size)

    def _pool(self, kept: int) -> str:
        num_blocks = self._scenario.config.num_blocks
        if not kept:
            return f"the pool has {_count(num_blocks)}"
        return f"the pool has {_count(num_blocks - kept)} besides the {kept} that prefixes keep"


def _stopped_beams(path: Path, spec: PaperRequestSpec) -> Found:
    """Survivors that no longer have a parent, because it said a stop token, and the same token twice under two names."""
    num_living = 1
    for index, survivors in enumerate(spec.forced_beams):
        place: Path = (*path, "force_beams", index)
        if not num_living:
            return [(place, "all beams have ended with a stop token, so nothing can follow; leave this selection out, or set ignore_eos")]
        for rank, (parent, token_id) in enumerate(survivors):
            if parent >= num_living:
                living = "only 1 beam goes" if num_living == 1 else f"only {num_living} beams go"
                return [
                    ((*place, rank, "parent"), f"there is no living beam {parent}: {living} on, the others ended with a stop token; count those that go on")
                ]
            if (parent, token_id) in survivors[:rank]:
                return [((*place, rank), "the same token after the same parent is named twice; a beam can go on with it only once")]
        num_living = sum(token_id not in spec.stop_token_ids for _, token_id in survivors)
    return []


def _count(number: int) -> str:
    return f"{number} block{'' if number == 1 else 's'}"


def _besides(shared: int) -> str:
    return f" besides the {shared} that it shares with its prefix" if shared else ""
