"""The comparison of Figure 2: cases counted by hand, the named workloads beside the paper, and what is refused."""

from __future__ import annotations

import time

import pytest

from engine.errors import InvalidInput
from engine.paper.memory_model import PAPER_NUM_SLOTS
from engine.paper.memory_simulation import SimulationResult, compare, simulate, thinned
from engine.paper.quoted import FIGURE_2, FIGURE_13
from engine.paper.reservation import SYSTEMS, System
from engine.paper.workload import Workload, WorkloadRequest, at_once, at_rate, like_alpaca, like_sharegpt, repeated
from scenarios.workloads import load_workload

NUM_REQUESTS = 3_000


def workload(*lengths: tuple[int, int], arrivals: tuple[float, ...] = ()) -> Workload:
    times = arrivals or (0.0,) * len(lengths)
    return Workload("W", "test", tuple(WorkloadRequest(t, p, o, f"R{i}") for i, (t, (p, o)) in enumerate(zip(times, lengths, strict=True))))


def test_one_request_by_hand() -> None:
    """P=3, O=2 in 16 slots, Oracle: 5 slots reserved, a chunk of 8. Iteration 1: 4 states, 1 reserved; iteration 2: 5 states. 3 slots rounded, 8 free."""
    times = simulate(workload((3, 2)), "orca_oracle", num_slots=16, block_size=4).times
    assert (times.iterations, times.token_states, times.reservation, times.internal, times.rounding, times.free) == (2, 4 + 5, 1, 0, 3 + 3, 8 + 8)
    times = simulate(workload((3, 2)), "orca_pow2", num_slots=16, block_size=4).times
    assert (times.token_states, times.reservation, times.internal, times.rounding, times.free) == (9, 1, 0, 6, 16), "2 is a power of two already"
    times = simulate(workload((3, 2)), "orca_max", num_slots=16, block_size=4, max_model_len=16).times
    assert (times.token_states, times.reservation, times.internal, times.rounding, times.free) == (9, 1, 22, 0, 0)
    times = simulate(workload((3, 2)), "paged", num_slots=16, block_size=4).times
    assert (times.token_states, times.reservation, times.internal, times.rounding, times.free) == (9, 0, 3, 0, 12 + 8), "block 2 comes with token 5"


def test_preemption_by_hand() -> None:
    """Block size 1, 6 blocks. A (2 in, 3 out) and B (1 in, 3 out) start with 3 + 2. Iteration 2 gives A the last block; for B there is none: B is its own
    latest victim and waits, with 1 token generated, till A is done after iteration 3. It comes back with 1 + 1 tokens and one more, iterations 4 and 5."""
    result = simulate(workload((2, 3), (1, 3)), "paged", num_slots=6, block_size=1, watermark=0.0)
    assert result.num_preemptions == 1
    assert result.batch_sizes == [(0, 2), (1, 1), (5, 0)]
    assert (result.times.token_states, result.times.free) == ((3 + 2) + 4 + 5 + 3 + 4, 1 + 2 + 1 + 3 + 2)
    assert result.times_while_waiting.iterations == 2


def test_the_watermark_does_not_count_for_one_alone() -> None:
    """4 blocks of 4, of which 3 must stay free: two requests of 2 blocks are served one after the other, never together, and nobody waits for ever."""
    result = simulate(workload((6, 2), (6, 2)), "paged", num_slots=16, block_size=4, watermark=0.75)
    assert (result.peak_batch_size, result.num_iterations) == (1, 4)
    result = simulate(workload((6, 2), (6, 2)), "paged", num_slots=16, block_size=4, watermark=0.0)
    assert (result.peak_batch_size, result.num_iterations) == (2, 2)


def test_nobody_overtakes() -> None:
    """Oracle, 16 slots: A takes 8 for 4 iterations, B wants 16 for 8 and waits, C would fit into the other 8 but came later: 4 + 8 + 1."""
    result = simulate(workload((4, 4), (8, 8), (4, 1)), "orca_oracle", num_slots=16, block_size=4)
    assert result.batch_sizes == [(0, 1), (13, 0)]


def test_idle_time_counts_for_nothing() -> None:
    result = simulate(workload((4, 2), (4, 2), arrivals=(3.5, 100.0)), "paged", num_slots=16)
    assert result.batch_sizes == [(4, 1), (6, 0), (100, 1), (102, 0)]
    assert (result.num_iterations, result.end, result.mean_batch_size) == (4, 102, 1.0)
    assert result.shares.free == 0.0
    assert result.shares_while_waiting.token_states == 0.0, "nobody ever waits"


@pytest.fixture(scope="module")
def sharegpt() -> dict[System, SimulationResult]:
    return compare(like_sharegpt(NUM_REQUESTS), num_slots=PAPER_NUM_SLOTS)


def test_lengths_like_sharegpt_give_the_bars_of_figure_2(sharegpt: dict[System, SimulationResult]) -> None:
    """Token states within 2.5 points of the paper's bars. Only Orca (Max) was fitted; its external part, 1392 of 15,728 slots, needs no workload at all."""
    for system, result in sharegpt.items():
        assert result.shares_while_waiting.token_states == pytest.approx(FIGURE_2[system]["token_states"].value, abs=2.5)
    assert sharegpt["orca_max"].shares_while_waiting.external == pytest.approx(100 * 1392 / 15_728, abs=1e-9)
    assert sharegpt["orca_max"].shares_while_waiting.reservation == pytest.approx(FIGURE_2["orca_max"]["reservation"].value, abs=0.5)
    assert sharegpt["orca_max"].shares_while_waiting.internal == pytest.approx(FIGURE_2["orca_max"]["internal"].value, abs=0.5)
    assert sharegpt["orca_oracle"].shares_while_waiting.external == pytest.approx(FIGURE_2["orca_oracle"]["external"].value, abs=2.5)
    assert sharegpt["orca_oracle"].shares_while_waiting.internal == 0.0


def test_lengths_like_sharegpt_give_the_batches_of_figure_13(sharegpt: dict[System, SimulationResult]) -> None:
    for system, result in sharegpt.items():
        assert result.mean_batch_size_while_waiting == pytest.approx(FIGURE_13["sharegpt"][system].value, rel=0.15)
    assert sharegpt["orca_max"].peak_batch_size == 7


@pytest.mark.parametrize("name", ["sharegpt-like", "alpaca-like", "azure-conversation", "azure-code"])
def test_order_of_the_systems(name: str) -> None:
    """On every named workload whose requests a model of 2,048 positions takes, knowing more about the output, and then reserving nothing, stores more tokens
    and serves more at once, in fewer iterations. (No law: a chunk rounded badly can undo what a shorter reservation won.)"""
    loaded = at_once(load_workload(name))
    results = compare(Workload(loaded.name, loaded.source, loaded.requests[:NUM_REQUESTS]), num_slots=PAPER_NUM_SLOTS)
    states = [results[system].shares_while_waiting.token_states for system in SYSTEMS]
    assert states == sorted(states)
    assert [results[system].mean_batch_size for system in SYSTEMS] == sorted(results[system].mean_batch_size for system in SYSTEMS)
    assert [results[system].num_iterations for system in SYSTEMS] == sorted((results[system].num_iterations for system in SYSTEMS), reverse=True)
    for result in results.values():
        for shares in (result.shares, result.shares_while_waiting):
            assert shares.token_states + shares.reservation + shares.internal + shares.external == pytest.approx(100)
        assert result.times.token_states + result.times.reservation + result.times.internal + result.times.rounding + result.times.free == (
            result.num_slots * result.num_iterations
        )
        assert result.num_requests + len(result.refused) == min(NUM_REQUESTS, len(loaded.requests))


def test_paging_wastes_less_than_a_block_per_request() -> None:
    """Section 4.3; summed over all iterations, at every block size."""
    for block_size in (1, 4, 16, 64):
        times = simulate(like_alpaca(500), "paged", num_slots=4_096, block_size=block_size).times
        assert times.reservation + times.internal <= (block_size - 1) * times.batch


def test_a_huge_memory_costs_nothing() -> None:
    """Ten billion slots: neither a list of blocks nor one of slots may be made."""
    for system in SYSTEMS:
        result = simulate(workload((300, 20)), system, num_slots=10**10)
        assert result.shares.free > 99.99


def test_refused_requests_are_counted_and_explained() -> None:
    long, fits = (2000, 49), (2000, 48)
    result = simulate(workload(long, fits), "paged", num_slots=4096)
    assert result.num_requests == 1
    assert [(r.request_id, r.reason) for r in result.refused] == [("R0", "its 2000 prompt and 49 output tokens are more than the model's 2048 positions")]
    result = simulate(workload(fits), "orca_oracle", num_slots=2047)
    assert result.refused[0].reason == "its reservation of 2048 slots is more than the largest chunk, 1024"
    assert (result.num_iterations, result.batch_sizes, result.snapshot, result.mean_batch_size) == (0, [], None, 0.0)
    result = simulate(workload(fits), "paged", num_slots=2047)
    assert result.refused[0].reason == "its 2048 tokens need more blocks than the 127 there are"


def test_more_arrivals_than_can_be_served_wait_longer() -> None:
    """By rate: a trickle runs alone and never waits, a flood always waits but at the end."""
    base = workload(*[(20, 20)] * 200)
    trickle = simulate(at_rate(base, 0.001), "paged", num_slots=512)
    flood = simulate(at_rate(base, 10.0), "paged", num_slots=512)
    assert trickle.times_while_waiting.iterations == 0
    assert trickle.mean_batch_size < 1.1
    assert flood.mean_batch_size > 9
    assert flood.times_while_waiting.iterations > 0.9 * flood.num_iterations


def test_ten_thousand_requests_under_four_systems_take_less_than_5_seconds() -> None:
    """Of processor time, so that a busy machine does not count."""
    workload = repeated(at_once(load_workload("azure-conversation")), 10_000)
    begin = time.process_time()
    results = compare(workload, num_slots=PAPER_NUM_SLOTS)
    assert time.process_time() - begin < 5
    assert all(result.num_requests > 9_000 for result in results.values())


def test_progress_rises_to_one() -> None:
    told: list[float] = []
    compare(workload(*[(5, 5)] * 500), num_slots=2048, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert 100 < len(told) <= 400


def test_thinning_keeps_the_mean() -> None:
    """10 points: each is the mean of its span, so that all spans together have the area that the changes had."""
    changes = [(3, 1), (10, 4), (11, 2), (60, 7), (61, 0), (90, 5)]
    assert thinned(changes, 103) == [*changes, (103, 0)]
    points = thinned(changes, 103, max_points=5)
    area = 7 * 1 + 1 * 4 + 49 * 2 + 1 * 7 + 29 * 0 + 13 * 5
    assert sum(mean * 20 for _, mean in points[:-1]) == pytest.approx(area)
    assert [start for start, _ in points] == [3, 23, 43, 63, 83, 103]
    assert points[1] == (23, 2.0)
    assert points[2] == (43, (17 * 2 + 7) / 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "num_slots is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_slots": 8}, "block_size is 16, but the whole memory has only 8 slots"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"system": "orca"}, "the system 'orca' is unknown"),
        ({"workload": Workload("W", "", ())}, "W has no requests"),
        ({"workload": Workload("W", "", (WorkloadRequest(0.0, 1, 1, "A"),), arrival_unit="seconds")}, "are in seconds"),
        ({"workload": Workload("W", "", (WorkloadRequest(0.0, 0, 1, "A"),))}, "lengths start at 1"),
        ({"workload": Workload("W", "", (WorkloadRequest(float("nan"), 1, 1, "A"),))}, "arrivals at 0"),
    ],
)
def test_bad_input(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"workload": workload((1, 1)), "system": "paged", "num_slots": 64, **changes}
    given, system = arguments.pop("workload"), arguments.pop("system")
    with pytest.raises(InvalidInput, match=message):
        simulate(given, system, **arguments)  # type: ignore[arg-type]
