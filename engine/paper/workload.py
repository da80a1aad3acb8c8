"""What the memory of a serving system is driven with: requests known by their lengths and arrivals alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import Literal

from engine.errors import InvalidInput

ArrivalUnit = Literal["iterations", "seconds"]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request: `prompt_len` tokens come in, `output_len` are generated (both at least 1). `arrival` is in the workload's unit, 0 is the start."""

    arrival: float
    prompt_len: int
    output_len: int
    request_id: str


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. `source`: where the lengths come from; `note`: what of it is ours, one or two sentences for the screen."""

    name: str
    source: str
    requests: tuple[WorkloadRequest, ...]
    note: str = ""
    arrival_unit: ArrivalUnit = "iterations"

    @property
    def mean_prompt_len(self) -> float:
        return fmean(r.prompt_len for r in self.requests)

    @property
    def mean_output_len(self) -> float:
        return fmean(r.output_len for r in self.requests)


def at_once(workload: Workload) -> Workload:
    """The same requests, all there from the start, so that somebody always waits until the last ones run: the memory is under full pressure."""
    return replace(workload, requests=tuple(replace(r, arrival=0.0) for r in workload.requests), arrival_unit="iterations")


def at_rate(workload: Workload, requests_per_iteration: float, seed: int = 0) -> Workload:
    """The same requests in the same order, arriving as a Poisson process of `requests_per_iteration` (the paper's section 6.1 makes its arrivals like that).

    Raises InvalidInput for a rate that is not above 0.
    """
    if not requests_per_iteration > 0 or math.isinf(requests_per_iteration):
        raise InvalidInput(f"the rate is {requests_per_iteration} requests per iteration, but it must be a number above 0")
    draw = random.Random(seed)
    now = 0.0
    requests = []
    for request in workload.requests:
        now += draw.expovariate(requests_per_iteration)
        requests.append(replace(request, arrival=now))
    return replace(workload, requests=tuple(requests), arrival_unit="iterations")


def at_timestamps(workload: Workload, iterations_per_second: float) -> Workload:
    """The same requests at the moments that the trace recorded, where so many iterations pass in a second. Raises InvalidInput for a scale that is not above 0,
    or for a workload whose arrivals are no seconds."""
    if workload.arrival_unit != "seconds":
        raise InvalidInput(f"the workload {workload.name} has no timestamps in seconds: let its requests arrive at once or at a rate")
    if not iterations_per_second > 0 or math.isinf(iterations_per_second):
        raise InvalidInput(f"the scale is {iterations_per_second} iterations per second, but it must be a number above 0")
    requests = tuple(replace(r, arrival=r.arrival * iterations_per_second) for r in workload.requests)
    return replace(workload, requests=requests, arrival_unit="iterations")


def repeated(workload: Workload, num_requests: int) -> Workload:
    """The first `num_requests` of the workload's requests, gone through as often as it takes; every round begins when the last one ended. Raises
    InvalidInput for a number below 1."""
    if num_requests < 1:
        raise InvalidInput(f"num_requests is {num_requests}, but a workload has at least 1 request")
    base = workload.requests
    period = max(r.arrival for r in base)
    rounds = -(-num_requests // len(base))
    requests = tuple(replace(r, arrival=r.arrival + k * period, request_id=f"{r.request_id}.{k}" if k else r.request_id) for k in range(rounds) for r in base)
    if rounds == 1:
        return replace(workload, requests=requests[:num_requests])
    return replace(workload, requests=requests[:num_requests], note=f"{workload.note} Its {len(base):,} requests are gone through {rounds} times.".strip())


def lognormal_lengths(mean: float, sigma: float, longest: int, count: int, draw: random.Random) -> list[int]:
    """`count` whole lengths from 1 to `longest` in random order, log-normal (cut off at `longest`) with this mean.

    `sigma`: standard deviation of the logarithm. One length is drawn from each of `count` equally probable slices, so that the mean of a few hundred already
    comes out close to `mean`. Raises InvalidInput where the mean cannot be.
    """
    if not 1 <= mean < longest / 2 or sigma <= 0 or count < 1:
        raise InvalidInput(f"no {count} lengths with mean {mean} and sigma {sigma} up to {longest}: the mean must be at least 1 and below half of the longest")
    normal = NormalDist()

    def cut_mean(mu: float) -> float:
        top = (math.log(longest + 0.5) - mu) / sigma
        return math.exp(mu + sigma * sigma / 2) * normal.cdf(top - sigma) / normal.cdf(top)

    low, high = -1.0, math.log(longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    share = normal.cdf((math.log(longest + 0.5) - low) / sigma)
    tiny = 1e-12
    quantiles = [max(tiny, min((i + draw.random()) / count * share, 1 - tiny)) for i in range(count)]
    lengths = [max(1, min(longest, round(math.exp(low + sigma * normal.inv_cdf(q))))) for q in quantiles]
    draw.shuffle(lengths)
    return lengths


def synthetic(
    name: str, source: str, note: str, *, prompt: tuple[float, float, int], output: tuple[float, float, int], num_requests: int, seed: int
) -> Workload:
    """Requests with log-normal lengths, `prompt` and `output` each as (mean, sigma, longest), independent of one another, all arriving at once."""
    draw = random.Random(seed)
    prompts: Sequence[int] = lognormal_lengths(*prompt, num_requests, draw)
    outputs: Sequence[int] = lognormal_lengths(*output, num_requests, draw)
    requests = tuple(WorkloadRequest(0.0, p, o, f"R{i}") for i, (p, o) in enumerate(zip(prompts, outputs, strict=True)))
    return Workload(name, source, requests, note)


def like_sharegpt(num_requests: int = 10_000, seed: int = 0) -> Workload:
    """Lengths like the paper's ShareGPT requests (Figure 11a): mean prompt 161.31, mean output 337.99. Longest 512 + 1,536, the positions of the paper's
    OPT."""
    return synthetic(
        "Lengths like ShareGPT",
        "means: paper, Figure 11a, as read by third parties",
        "Only the mean lengths are the paper's (prompt 161.31, output 337.99). Their spread is ours: log-normal and independent of each other, "
        "prompts with sigma 1.2 up to 512 tokens, outputs with sigma 1.0 up to 1,536. Sigma and limits were chosen with the paper's bars in view, "
        "Orca (Max) first: that the bars agree is a fit, not a prediction.",
        prompt=(161.31, 1.2, 512),
        output=(337.99, 1.0, 1536),
        num_requests=num_requests,
        seed=seed,
    )


def like_alpaca(num_requests: int = 10_000, seed: int = 0) -> Workload:
    """Lengths like the paper's Alpaca requests (Figure 11b): mean prompt 19.31, mean output 58.45. Longest 1,024 each."""
    return synthetic(
        "Lengths like Alpaca",
        "means: paper, Figure 11b, as read by third parties",
        "Only the mean lengths are the paper's (prompt 19.31, output 58.45). Their spread is ours: log-normal and independent of each other, "
        "prompts with sigma 0.5, outputs with sigma 0.9, both up to 1,024 tokens.",
        prompt=(19.31, 0.5, 1024),
        output=(58.45, 0.9, 1024),
        num_requests=num_requests,
        seed=seed,
    )
