"""The choice of the next token from one row of logits: greedy, drawn with a seed, or dictated by the scenario."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.output import SampledToken, SamplingParams
from engine.errors import InvalidInput
from engine.trace.events import Cause, CauseKind, Fact

DEFAULT_SEED = 0


def make_generator(params: SamplingParams) -> torch.Generator:
    """The request's own source of randomness, on the CPU: draws depend neither on the device nor on which requests share the batch.
    A request without a seed gets seed 0, because a run is the same every time."""
    return torch.Generator(device="cpu").manual_seed(_seed(params))


def sample(logits: torch.Tensor, params: SamplingParams, num_output_tokens: int, generator: torch.Generator) -> SampledToken:
    """Choose output token number `num_output_tokens` (from 0) of a request. `logits`: float [vocab].

    Ties go to the lowest token id. A draw advances `generator` by exactly one number, also when the token is dictated, so that the n-th draw is the
    same whatever came before. Probabilities in facts are rounded to 4 digits; a drawn token's is the one at its temperature.
    """
    model = _from_model(logits, params, generator)
    if num_output_tokens < len(params.forced_token_ids):
        forced = params.forced_token_ids[num_output_tokens]
        return SampledToken(forced, Cause(CauseKind.FORCED, {"model_token_id": model.token_id}))
    return model


def _from_model(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> SampledToken:
    if params.temperature == 0:
        scores = logits.detach().to(device="cpu", dtype=torch.float32)
        token_id = int(scores.numpy().argmax())  # the first among equals, as numpy documents; ten times faster than torch's for a large vocabulary
        # The largest term of the softmax. Terms in float32 and their sum in float64 are exact far beyond the four digits that are told.
        probability = round(1 / float((scores - scores[token_id]).exp_().sum(dtype=torch.float64)), 4)
        return SampledToken(token_id, Cause(CauseKind.GREEDY, {"probability": probability}))
    scores = logits.detach().to(device="cpu", dtype=torch.float64)
    probabilities = torch.softmax(scores / params.temperature, 0)
    cumulative = probabilities.cumsum(0)
    draw = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    token_id = int(torch.searchsorted(cumulative, draw, right=True).clamp_max(len(scores) - 1))
    facts: dict[str, Fact] = {
        "probability": round(float(probabilities[token_id]), 4),
        "temperature": params.temperature,
        "seed": _seed(params),
    }
    return SampledToken(token_id, Cause(CauseKind.SEEDED, facts))


def top_logprobs(logits: torch.Tensor, num_logprobs: int, token_ids_asked: Sequence[int] = ()) -> dict[int, float]:
    """Natural logarithms of the probabilities of the `num_logprobs` most probable tokens, most probable first (ties: lower id first), then of those of
    `token_ids_asked` that are not among them. `logits`: float [vocab]; the arithmetic is float64 on the CPU."""
    if not num_logprobs and not token_ids_asked:
        return {}
    logprobs = torch.log_softmax(logits.detach().to(device="cpu", dtype=torch.float64), 0)
    token_ids: list[int] = []
    if num_logprobs:
        # topk promises no order among equals, so it only gives the least value: all that are not below it are then put in order.
        least = logprobs.topk(min(num_logprobs, len(logprobs))).values[-1]
        among = torch.nonzero(logprobs >= least).squeeze(1)
        order = logprobs[among].sort(descending=True, stable=True).indices
        token_ids = among[order][:num_logprobs].tolist()
    return {token_id: float(logprobs[token_id]) for token_id in dict.fromkeys([*token_ids, *token_ids_asked])}


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, request_id: str) -> None:
    """Raise InvalidInput for the first id that the model's embedding of `vocab_size` rows does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidInput(
                f"Token id {token_id} of request {request_id} is outside the model's vocabulary of {vocab_size} tokens (0 to {vocab_size - 1}); "
                "use ids from this range or give text."
            )


def _seed(params: SamplingParams) -> int:
    return DEFAULT_SEED if params.seed is None else params.seed
