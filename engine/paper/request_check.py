"""Refuse at the door what could only wait for ever: requests that no iteration can serve, groups that the pool cannot hold even alone."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvalidInput
from engine.paper.config import PaperConfig, PaperRequestSpec


def num_blocks_alone(spec: PaperRequestSpec, config: PaperConfig, num_prefix_tokens: int = 0) -> int:
    """The most blocks that the request can refer to at one time, a prefix's full blocks apart: with so many it always gets to its end.

    All sequences share the full blocks of the prompt; in the worst case nothing else. The last token needs no slot, its key and value are never computed."""
    num_shared, num_blocks = len(spec.prompt_token_ids) // config.block_size, _num_blocks_of_one(spec, config)
    return num_shared - num_prefix_tokens // config.block_size + _num_writers(spec, config) * (num_blocks - num_shared)


def num_blocks_at_least(spec: PaperRequestSpec, config: PaperConfig, num_prefix_tokens: int = 0) -> int:
    """The fewest blocks with which the request can get to its end, if no stop token ends it earlier.

    Samples go apart for good, so it is what `num_blocks_alone` says. How much beams share is known only when they are chosen: at least every living beam writes
    its last token into a block of its own; of beams that a scenario forces there may be fewer."""
    if spec.beam_width is None:
        return num_blocks_alone(spec, config, num_prefix_tokens)
    num_writers = 1 if spec.forced_beams else _num_writers(spec, config)
    return _num_blocks_of_one(spec, config) - num_prefix_tokens // config.block_size + num_writers - 1


def _num_blocks_of_one(spec: PaperRequestSpec, config: PaperConfig) -> int:
    """Blocks of one sequence in the iteration that gives its last token."""
    num_tokens = len(spec.prompt_token_ids) if spec.is_prefix else max_num_tokens(spec, config) - 1
    return -(-num_tokens // config.block_size)


def _num_writers(spec: PaperRequestSpec, config: PaperConfig) -> int:
    """Sequences that write outputs: one where the prompt's iteration gives the only token."""
    if spec.is_prefix or max_num_tokens(spec, config) - 1 <= len(spec.prompt_token_ids):
        return 1
    return spec.beam_width or spec.n


def max_num_tokens(spec: PaperRequestSpec, config: PaperConfig) -> int:
    """Prompt and outputs of one sequence at most."""
    num_tokens = len(spec.prompt_token_ids) + spec.max_tokens
    return num_tokens if config.max_model_len is None else min(num_tokens, config.max_model_len)


def check_request(spec: PaperRequestSpec, config: PaperConfig, others: Iterable[PaperRequestSpec] = ()) -> None:
    """Raises InvalidInput when `spec` can never be served beside `others` (those that are there or will be, its prefix among them). Changes nothing."""
    known = {other.request_id: other for other in others if other is not spec}
    name = f"request {spec.request_id!r}"
    num_prompt = len(spec.prompt_token_ids)
    _check_names(spec, known)
    prefix = _check_prefix(spec, known)
    num_prefix_tokens = len(prefix.prompt_token_ids) if prefix is not None else 0
    limit = config.max_model_len
    if limit is not None and num_prompt >= limit + spec.is_prefix:
        raise InvalidInput(f"{name} has a prompt of {num_prompt} tokens, but max_model_len is {limit}: shorten the prompt or raise max_model_len")
    num_wanted = num_prompt - num_prefix_tokens
    if num_wanted > config.max_num_batched_tokens:
        raise InvalidInput(
            f"{name} has {num_wanted} prompt tokens to compute, but a prompt is computed in one piece and an iteration holds "
            f"{config.max_num_batched_tokens}: shorten the prompt or raise max_num_batched_tokens"
        )
    num_sequences, what = (spec.beam_width, "beams") if spec.beam_width is not None else (spec.n, "samples")
    for setting in ("max_num_seqs", "max_num_batched_tokens"):
        if num_sequences > getattr(config, setting):
            raise InvalidInput(f"{name} has {num_sequences} {what}, which run together, but {setting} is {getattr(config, setting)}: raise it")
    _check_forced_beams(spec, name)
    kept = sum(-(-len(other.prompt_token_ids) // config.block_size) for other in known.values() if other.is_prefix)
    num_needed, num_usable = num_blocks_at_least(spec, config, num_prefix_tokens), config.num_blocks - kept
    if num_needed > num_usable:
        beside = f" besides the {kept} of kept prefixes" if kept else ""
        lower = "shorten it" if spec.is_prefix else f"lower max_tokens ({spec.max_tokens}){f' or the number of {what}' if num_sequences > 1 else ''}"
        raise InvalidInput(f"{name} needs {num_needed} blocks at one time, but the pool has {num_usable}{beside}: {lower}, or raise num_blocks")


def _check_names(spec: PaperRequestSpec, known: dict[str, PaperRequestSpec]) -> None:
    if spec.request_id in known:
        raise InvalidInput(f"there is a request {spec.request_id!r} already: give every request its own id")
    for other in known.values():
        for group, sequence in ((spec, other), (other, spec)):
            tail = sequence.request_id.removeprefix(group.request_id)
            if (group.n > 1 or group.beam_width is not None) and tail != sequence.request_id and tail.isdigit():
                raise InvalidInput(f"the sequences of {group.request_id!r} are called {group.request_id}1, {group.request_id}2, …, so no request can be called "
                                   f"{sequence.request_id!r}: rename one of them")  # fmt: skip


def _check_prefix(spec: PaperRequestSpec, known: dict[str, PaperRequestSpec]) -> PaperRequestSpec | None:
    name = f"request {spec.request_id!r}"
    if spec.is_prefix and (spec.n > 1 or spec.beam_width is not None or spec.prefix_id is not None):
        raise InvalidInput(f"{name} is a prefix, which is one sequence without outputs: leave samples, beams and prefix_id out")
    if spec.prefix_id is None:
        return None
    prefix = known.get(spec.prefix_id)
    if prefix is None or not prefix.is_prefix:
        raise InvalidInput(f"{name} begins with the prefix {spec.prefix_id!r}, but there is no such prefix: declare it, or correct the id")
    length = len(prefix.prompt_token_ids)
    if spec.prompt_token_ids[:length] != prefix.prompt_token_ids:
        raise InvalidInput(f"{name} does not begin with the tokens of prefix {spec.prefix_id!r}: its first {length} prompt tokens must be those of the prefix")
    if len(spec.prompt_token_ids) == length:
        raise InvalidInput(f"{name} is the prefix {spec.prefix_id!r} and nothing more: give it at least one prompt token of its own to compute")
    return prefix


def _check_forced_beams(spec: PaperRequestSpec, name: str) -> None:
    if not spec.forced_beams:
        return
    if spec.beam_width is None:
        raise InvalidInput(f"{name} names survivors of a beam search, but has no beam_width: give it one")
    if len(spec.forced_beams) > spec.max_tokens:
        raise InvalidInput(f"{name} names the survivors of {len(spec.forced_beams)} selections, but max_tokens allows {spec.max_tokens}")
    num_living = 1
    for number, survivors in enumerate(spec.forced_beams, start=1):
        if not 1 <= len(survivors) <= spec.beam_width or len(set(survivors)) != len(survivors):
            raise InvalidInput(f"{name}: selection {number} must name 1 to {spec.beam_width} different survivors")
        if any(not 0 <= parent < num_living for parent, _ in survivors):
            raise InvalidInput(f"{name}: selection {number} names a parent that is not there; {num_living} beams live then, counted from 0")
        num_living = sum(token_id not in spec.stop_token_ids for _, token_id in survivors)
        if not num_living and number < len(spec.forced_beams):
            raise InvalidInput(f"{name}: all survivors of selection {number} end with a stop token, so no selection can follow")
