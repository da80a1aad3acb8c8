"""Workloads: the paper's means come out, arrivals are what was asked for, and every trace of the library is there with its licence."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, stdev

import pytest

from engine.errors import InvalidInput
from engine.paper.quoted import FIGURE_11
from engine.paper.workload import Workload, WorkloadRequest, at_once, at_rate, at_timestamps, like_alpaca, like_sharegpt, lognormal_lengths, repeated
from scenarios.workloads import TRACES, load_workload, workload_names


@pytest.mark.parametrize(("name", "make"), [("sharegpt", like_sharegpt), ("alpaca", like_alpaca)])
@pytest.mark.parametrize("num_requests", [300, 10_000])
def test_means_are_the_papers(name: str, make: object, num_requests: int) -> None:
    assert callable(make)
    workload: Workload = make(num_requests, seed=3)
    assert len(workload.requests) == num_requests
    assert workload.mean_prompt_len == pytest.approx(FIGURE_11[name]["prompt"].value, rel=0.01)
    assert workload.mean_output_len == pytest.approx(FIGURE_11[name]["output"].value, rel=0.01)
    assert max(r.prompt_len + r.output_len for r in workload.requests) <= 2048
    assert workload == make(num_requests, seed=3)
    assert workload.requests != make(num_requests, seed=4).requests
    assert "Only the mean lengths are the paper's" in workload.note


def test_lengths_cannot_have_every_mean() -> None:
    import random

    with pytest.raises(InvalidInput, match=r"mean 600 and sigma 1\.0 up to 1000"):
        lognormal_lengths(600, 1.0, 1000, 10, random.Random(0))


def numbered(count: int) -> Workload:
    return Workload("W", "test", tuple(WorkloadRequest(float(i), i + 1, i + 2, f"R{i}") for i in range(count)), arrival_unit="seconds")


def test_arrivals() -> None:
    workload = numbered(5)
    assert [r.arrival for r in at_once(workload).requests] == [0.0] * 5
    assert [r.arrival for r in at_timestamps(workload, 20).requests] == [0.0, 20.0, 40.0, 60.0, 80.0]
    assert at_timestamps(workload, 20).arrival_unit == "iterations"
    with pytest.raises(InvalidInput, match="no timestamps in seconds"):
        at_timestamps(at_once(workload), 20)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="above 0"):
            at_timestamps(workload, scale)
        with pytest.raises(InvalidInput, match="above 0"):
            at_rate(workload, scale)


def test_a_rate_is_a_poisson_process() -> None:
    """Gaps between arrivals have the mean 1/rate, and exponential ones have as much deviation as mean."""
    requests = at_rate(numbered(4_000), 0.25, seed=1).requests
    gaps = [b.arrival - a.arrival for a, b in pairwise(requests)]
    assert fmean(gaps) == pytest.approx(4, rel=0.05)
    assert stdev(gaps) == pytest.approx(4, rel=0.08)
    assert [r.request_id for r in requests] == [f"R{i}" for i in range(4_000)]


def test_repeating() -> None:
    workload = repeated(numbered(3), 7)
    assert [(r.arrival, r.prompt_len, r.request_id) for r in workload.requests][2:5] == [(2.0, 3, "R2"), (2.0, 1, "R0.1"), (3.0, 2, "R1.1")]
    assert len({r.request_id for r in workload.requests}) == 7
    assert "Its 3 requests are gone through 3 times." in workload.note
    assert repeated(numbered(3), 2) == numbered(2)
    with pytest.raises(InvalidInput, match="num_requests is 0"):
        repeated(numbered(3), 0)


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [
        ("azure-conversation", 500, 935, 265),
        ("azure-code", 500, 2163, 24),
        ("mooncake-conversation", 400, None, None),
        ("mooncake-synthetic", 300, None, None),
    ],
)
def test_the_librarys_traces(name: str, count: int, prompt: int | None, output: int | None) -> None:
    """Numbers of requests and means as the traces' own descriptions give them."""
    workload = load_workload(name)
    assert (len(workload.requests), workload.arrival_unit) == (count, "seconds")
    if prompt is not None and output is not None:
        assert (round(workload.mean_prompt_len), round(workload.mean_output_len)) == (prompt, output)
    assert ("Splitwise" in workload.source) == name.startswith("azure")


def test_every_name_and_every_file() -> None:
    assert workload_names()[:2] == ("sharegpt-like", "alpaca-like")
    readme = (TRACES / "README.md").read_text("utf-8")
    files = {path.name for path in TRACES.iterdir()} - {"README.md"}
    assert len(files) == 4
    assert all(f"`{name}`" in readme for name in files)
    assert "CC-BY 4.0" in readme
    with pytest.raises(InvalidInput, match="the workload 'x' is unknown: take one of sharegpt-like"):
        load_workload("x")
