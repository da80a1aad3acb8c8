"""What of `tests.bench.gpu` can be proved without a GPU: its bytes by hand, its checks on small shapes, its budget by a clock that is set, its table."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.bench import gpu
from tests.bench.gpu import Bench, Row, main, rows, summary
from tests.bench.gpu_cases import LLAMA, SMOLLM2, DecodeCase, Heads, attention_error, copy_bytes, decode_batch, decode_cases, page_table, write_bytes
from tests.bench.gpu_timing import Budget, ClockTimer
from tests.ragged import dense_attention, make_batch

SMALL = Heads("small", 4, 2, 16)


def bench(backend: kernels.Backend | str = "interpret", dtype: torch.dtype = torch.bfloat16) -> Bench:
    return Bench("cpu", backend, ClockTimer(), flush_bytes=20_000, dtype=dtype)


def test_bytes_counted_by_hand():
    """Llama: 1024 tokens * 8 heads * 128 numbers * 2 bytes are 2 MiB of keys; queries and outputs 32 * 128 * 2 bytes each; 64 table entries of 4."""
    one = DecodeCase(LLAMA, 1, 1024, 16)
    assert one.kv_bytes == 2 * 2 * 2**20
    assert one.num_bytes == 4 * 2**20 + 2 * 8192 + 64 * 4
    four = DecodeCase(SMOLLM2, 4, 100, 32)
    assert four.kv_bytes == 2 * 4 * 100 * 3 * 64 * 2 == 307_200
    assert four.num_bytes == 307_200 + 2 * (4 * 9 * 64 * 2) + 4 * 4 * 4
    assert write_bytes(64, LLAMA, 2) == 64 * (4 * 2048 + 8)
    assert copy_bytes(10, 16, SMOLLM2, 2) == 10 * (4 * 16 * 384 + 16)
    assert gpu.gigabytes_per_second(3_350_000_000, 1.0) == pytest.approx(3350.0)


def test_cases_are_those_of_the_issue_smallest_first():
    """Contexts 1k to 32k, batches 1 to 64, blocks of 16 and 32, two models."""
    cases = decode_cases(quick=False)
    assert {case.context for case in cases} == {1024, 4096, 8192, 16384, 32768}
    assert {case.batch for case in cases} == {1, 4, 16, 64}
    assert {case.block_size for case in cases} == {16, 32}
    assert len(cases) == len(set(cases)) == 5 * 4 * 2 * 2
    assert [case.num_bytes for case in cases] == sorted(case.num_bytes for case in cases)
    assert set(decode_cases(quick=True)) < set(cases)


def test_every_page_is_used_once_and_the_null_block_never():
    table, num_blocks = page_table(3, 5, "cpu")
    assert sorted(table.flatten().tolist()) == list(range(1, num_blocks))


def test_sets_of_requests_share_nothing():
    batch = decode_batch(DecodeCase(SMALL, 2, 20, 8), 3, torch.float32, "cpu")
    assert len(batch.tables) == 3
    blocks = [set(table.flatten().tolist()) for table in batch.tables]
    assert not blocks[0] & blocks[1]
    assert not blocks[1] & blocks[2]
    keys, values = batch.gathered(1)
    assert keys.shape == values.shape == (2, 2, 20, 16)
    assert torch.equal(keys[1, :, 17], batch.key_cache[int(batch.tables[1][1, 2]), 1])


@pytest.mark.parametrize("window", [None, 7])
def test_the_error_is_the_distance_from_float64(window):
    """Against the dense computation of the kernels' tests, which shares no code with this one; relative to the largest number of the request."""
    batch = make_batch([5, 1, 0, 3], [12, 9, 4, 3], num_q_heads=6, num_kv_heads=2)
    expected = dense_attention(batch, 0.3, window)
    assert attention_error(expected, *batch.arguments, scale=0.3, sliding_window=window) < 1e-12
    largest = float(expected[6:9].abs().max())  # of the request with three queries
    expected[6, 2, 5] += 0.25
    assert attention_error(expected, *batch.arguments, scale=0.3, sliding_window=window) == pytest.approx(0.25 / largest)
    assert attention_error(expected, *batch.arguments, scale=0.3, sliding_window=window, requests=[0, 1]) < 1e-12


@pytest.mark.parametrize("backend", ["interpret", kernels.interpreted_like_gpu(splits=2)], ids=["interpret", "like a GPU"])
def test_a_decode_is_measured_and_right(backend):
    row = bench(backend).decode(DecodeCase(SMALL, 2, 70, 16), copy_bandwidth=10.0)
    assert row.verdict == "right"
    assert 0 < row.error < 2e-2
    assert row.sdpa > 0
    assert row.gathered_sdpa > 0
    num_bytes = 2 * 2 * 70 * 2 * 16 * 2 + 2 * 2 * 4 * 16 * 2 + 4 * 2 * 5
    assert row.bandwidth == pytest.approx(num_bytes / row.milliseconds / 1e6)
    assert row.share == pytest.approx(row.bandwidth / 10.0)


def test_writes_and_copies_are_measured_and_right():
    measured = [
        bench().write(9, SMALL, 10.0),
        bench().copy(3, SMALL, 10.0),
        bench(kernels.interpreted_like_gpu()).copy(3, SMALL, 10.0, hazards=True),
    ]
    assert [row.verdict for row in measured] == ["right"] * 3
    assert all(row.share > 0 for row in measured)


def test_checks_find_every_kernel_right():
    found = list(bench("torch").checks(quick=False))
    assert [row.verdict for row in found] == ["right"] * len(found)
    assert [row.operation for row in found].count("slot mapping") == 1
    text = "\n".join(row.case for row in found)
    for part in ("decodes", "mixed", "float32", "float16", "bfloat16", "9/3 of 64", "32/8 of 128", "4/1 of 256", "8/8 of 80", "8/2 of 32", "window 100"):
        assert part in text
    assert len(list(bench("torch").checks(quick=True))) < len(found)


def test_one_check_of_the_interpreted_kernel():
    row = bench()._check_attention("mixed", [5, 1], [9, 30], torch.float32, (4, 2, 16), 7)
    assert (row.verdict, row.error < 1e-5) == ("right", True)


def test_a_wrong_result_is_called_wrong(monkeypatch):
    """A kernel that writes nothing, one that is far off, and one that yields NaN."""
    monkeypatch.setattr(kernels, "reshape_and_cache", lambda *arguments, **named: None)
    assert bench().write(9, SMALL, 10.0).verdict == "WRONG"
    assert gpu._verdict(0.1, 2e-2, 0.9) == "WRONG (more than 0.02)"
    assert gpu._verdict(float("nan"), 2e-2, 0.9) == "WRONG (more than 0.02)"


def test_the_goal_is_for_long_contexts():
    assert gpu._verdict(0.0, 1.0, 0.8) == "right, goal of 80% reached"
    assert gpu._verdict(0.0, 1.0, 0.799) == "right, goal of 80% missed"
    assert gpu._verdict(0.0, 1.0, None) == "right"


class Clock:
    """Says what it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_drops_what_would_not_fit():
    clock = Clock()
    budget = Budget(10.0, clock)

    def takes(seconds: float):
        def work() -> None:
            clock.now += seconds

        return work

    assert budget.run("small", 100, takes(2.0))  # nothing is known yet
    assert budget.expected(100) == pytest.approx(1.5 * 2.0)
    assert budget.expected(50) == pytest.approx(1.5 * 2.0)  # smaller ones are no faster
    assert budget.expected(200) == pytest.approx(1.5 * 4.0)
    assert budget.run("double", 200, takes(4.0))  # 8 seconds left, 6 expected
    assert budget.left == pytest.approx(4.0)
    assert not budget.run("again", 200, takes(1.0))  # 4 seconds left, 6 expected
    assert not budget.run("large", 10**9, takes(1.0))
    assert budget.run("small again", 90, lambda: None) is False  # the last one took 4 seconds for 200
    assert budget.dropped == ["again", "large", "small again"]


def test_a_run_from_checks_to_summary(monkeypatch):
    """The largest decode no longer fits, one runs out of memory, one is wrong; all of it is said."""
    clock = Clock()
    cases = [DecodeCase(SMALL, 1, 20, 8), DecodeCase(SMALL, 1, 8192, 8), DecodeCase(SMALL, 2, 8192, 8), DecodeCase(SMALL, 64, 8192, 8)]
    monkeypatch.setattr(gpu, "decode_cases", lambda quick: cases)
    monkeypatch.setattr(Bench, "checks", lambda self, quick: iter([Row("slot mapping", "3 requests", 0.0, "right")]))
    monkeypatch.setattr(Bench, "write", lambda self, n, h, c: Row("KV write", f"{n} tokens", float("inf"), "WRONG", 1.0, 2.0, 0.5))
    monkeypatch.setattr(Bench, "copy", lambda self, n, h, c, b, z: Row("page copy", f"{n} pages", 0.0, "right", 1.0, 2.0, 0.5))

    def decode(self: Bench, case: DecodeCase, copy_bandwidth: float) -> Row:
        clock.now += 1.0
        if case.batch == 2:
            raise torch.OutOfMemoryError("out of memory")
        share = 0.81 if case.context > 100 else 0.1
        return Row("decode", str(case), 0.0, gpu._verdict(0.0, 1.0, share if case.context >= gpu.LONG_CONTEXT else None), 1.0, 2.0, share, 2.0, 3.0)

    monkeypatch.setattr(Bench, "decode", decode)
    budget = Budget(30.0, clock)
    measured = list(rows(Bench("cpu", "torch", ClockTimer(), flush_bytes=2_000_000), budget, 10.0, quick=True))
    assert [row.operation for row in measured] == ["slot mapping"] + ["KV write"] * 4 + ["page copy"] * 4 + ["decode"] * 2
    sentences = list(summary(measured, budget))
    assert sentences[:2] == ["7 of 11 results are right.", "1 of 1 decodes of 8192 tokens and more reach 80% of the copy's bandwidth."]
    assert sentences[2].startswith(
        "Dropped, because time or memory ran out: decode, small, batch 2, context 8192, blocks of 8 (out of memory); decode, small, batch 64"
    )
    lines = [Row.HEADER, *map(str, measured)]
    column = Row.HEADER.index("verdict")
    assert [line[column:] for line in lines] == ["verdict", *(row.verdict for row in measured)]  # columns stand under each other


def test_without_a_gpu_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "need a CUDA device" in said.err
    with pytest.raises(SystemExit):
        main(["--slow"])
