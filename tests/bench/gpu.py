"""The compiled kernels on a GPU, in one table: `python -m tests.bench.gpu` checks each against float64 and measures it, in less than 8 minutes.

Decode attention is compared with torch's scaled_dot_product_attention on keys and values that were gathered before (and with gathering and attention
together), and with the bandwidth of a device-to-device copy measured in the same run; KV write and page copy with that bandwidth. The goal: decoding moves its
keys and values with at least 80 % of the copy's bandwidth, for contexts of 8192 tokens and more. Launches take turns on sets of requests that together are
several times as large as the GPU's cache, so that nothing is read from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import kernels
from kernels import Backend
from tests.bench.gpu_cases import (
    LLAMA,
    SMOLLM2,
    DecodeCase,
    Heads,
    attention_error,
    copy_bytes,
    decode_batch,
    decode_cases,
    page_table,
    random_normal,
    write_bytes,
)
from tests.bench.gpu_timing import Budget, EventTimer, Timer

GOAL = 0.80
LONG_CONTEXT = 8192
SECONDS = 420.0
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
NO_GPU = "This measures the compiled kernels, which need a CUDA device, and torch finds none here; run it on a machine with an NVIDIA GPU."


@dataclass(frozen=True)
class Row:
    """A line of the table. `error`: largest difference from float64, relative to the largest number (0 where bits must agree); `milliseconds` of one launch
    (or the launches of one operation),
    `bandwidth` in GB/s, `share` of the copy's bandwidth; `sdpa`, `gathered_sdpa`: milliseconds of torch's attention on gathered keys, alone and with gathering;
    `verdict`: of the check, and of the goal."""

    operation: str
    case: str
    error: float
    verdict: str
    milliseconds: float | None = None
    bandwidth: float | None = None
    share: float | None = None
    sdpa: float | None = None
    gathered_sdpa: float | None = None

    HEADER = f"{'operation':16} {'case':62} {'error':>8} {'ms':>9} {'GB/s':>7} {'of copy':>8} {'SDPA ms':>9} {'gather+SDPA':>12} {'SDPA/ours':>9}  verdict"

    def __str__(self) -> str:
        numbers = [
            f"{self.error:8.1e}",
            _number(self.milliseconds, "9.4f"),
            _number(self.bandwidth, "7.0f"),
            _number(None if self.share is None else 100 * self.share, "7.1f") + ("%" if self.share is not None else " "),
            _number(self.sdpa, "9.4f"),
            _number(self.gathered_sdpa, "12.4f"),
            _number(self.sdpa / self.milliseconds if self.sdpa and self.milliseconds else None, "9.2f"),
        ]
        return f"{self.operation:16} {self.case:62} {' '.join(numbers)}  {self.verdict}"


def _number(value: float | None, form: str) -> str:
    return f"{'-':>{int(form.split('.')[0])}}" if value is None else f"{value:{form}}"


@dataclass(frozen=True)
class Bench:
    """Where and by what it is measured. `flush_bytes`: what launches that take turns must have between them, several times the GPU's cache."""

    device: str
    backend: Backend | str
    timer: Timer
    flush_bytes: int
    dtype: torch.dtype = torch.bfloat16

    def copy_bandwidth(self, num_bytes: int) -> float:
        """GB/s of a copy from one part of memory to another: bytes read and bytes written."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return gigabytes_per_second(2 * num_bytes, self.timer.milliseconds([lambda: target.copy_(source)]))

    def decode(self, case: DecodeCase, copy_bandwidth: float) -> Row:
        """One decode step, and torch's attention for the same numbers."""
        sets = max(1, min(64, -(-self.flush_bytes // case.kv_bytes)))
        batch = decode_batch(case, sets, self.dtype, self.device)
        outs = [torch.empty_like(batch.query) for _ in range(sets)]
        error = 0.0
        for which in {0, sets - 1}:
            out = batch.attend(which, outs[which], self.backend)
            arguments = (out, batch.query, batch.key_cache, batch.value_cache, batch.tables[which], batch.query_start_loc, batch.seq_lens)
            error = max(error, attention_error(*arguments, scale=batch.scale, requests={0, case.batch - 1}))
        ours = self.timer.milliseconds([lambda which=which: batch.attend(which, outs[which], self.backend) for which in range(sets)])
        query = batch.query.unsqueeze(2)

        def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=batch.scale, enable_gqa=True)

        sdpa = gathered_sdpa = None
        try:
            gathered_sdpa = self.timer.milliseconds([lambda which=which: attend(*batch.gathered(which)) for which in range(min(sets, 4))])
            gathered = [batch.gathered(which) for which in range(sets)]
            sdpa = self.timer.milliseconds([lambda pair=pair: attend(*pair) for pair in gathered])
        except torch.OutOfMemoryError:  # they need the keys and values a second and a third time
            pass
        share = gigabytes_per_second(case.num_bytes, ours) / copy_bandwidth
        return Row(
            "decode",
            str(case),
            error,
            _verdict(error, TOLERANCES[self.dtype], share if case.context >= LONG_CONTEXT else None),
            ours,
            gigabytes_per_second(case.num_bytes, ours),
            share,
            sdpa,
            gathered_sdpa,
        )

    def write(self, num_tokens: int, heads: Heads, copy_bandwidth: float, block_size: int = 16) -> Row:
        """The KV write of so many tokens to scattered slots; several sets of caches take turns."""
        num_bytes = write_bytes(num_tokens, heads, self.dtype.itemsize)
        shape = (num_tokens, heads.num_kv_heads, heads.head_dim)
        sets = max(1, min(64, -(-self.flush_bytes // num_bytes)))
        keys, values = (random_normal((sets, *shape), self.dtype, self.device) for _ in range(2))
        num_blocks = -(-num_tokens // block_size) + 1
        key_cache, value_cache = (torch.zeros(sets, num_blocks, block_size, *shape[1:], dtype=self.dtype, device=self.device) for _ in range(2))
        slots = torch.randperm(num_blocks * block_size, device=self.device)[:num_tokens]

        def write(which: int) -> None:
            kernels.reshape_and_cache(keys[which], values[which], key_cache[which], value_cache[which], slots, backend=self.backend)

        milliseconds = self.timer.milliseconds([lambda which=which: write(which) for which in range(sets)])
        pairs = ((key_cache, keys), (value_cache, values))
        right = all(torch.equal(cache[which].flatten(0, 1)[slots], given[which]) for cache, given in pairs for which in (0, sets - 1))
        return self._moved("KV write", f"{heads.model}, {num_tokens} tokens", right, num_bytes, milliseconds, copy_bandwidth)

    def copy(self, num_pages: int, heads: Heads, copy_bandwidth: float, block_size: int = 16, hazards: bool = False) -> Row:
        """The copy of so many pages. With `hazards` pages are both read and written, so that all of it takes the way through a buffer."""
        num_bytes = copy_bytes(num_pages, block_size, heads, self.dtype.itemsize)
        shape = (2 * num_pages + 1, block_size, heads.num_kv_heads, heads.head_dim)
        keys, values = (random_normal(shape, self.dtype, self.device) for _ in range(2))
        table, _ = page_table(2, num_pages, "cpu")
        pairs = table.long().T.contiguous()
        if hazards:
            pairs[0, 1] = pairs[1, 0]
        before = keys.clone()
        kernels.copy_blocks([keys], [values], pairs, backend=self.backend)
        right = torch.equal(keys[pairs[:, 1].to(self.device)], before[pairs[:, 0].to(self.device)])
        on_device = pairs.to(self.device) if hazards else pairs
        milliseconds = self.timer.milliseconds([lambda: kernels.copy_blocks([keys], [values], on_device, backend=self.backend)], graph=hazards)
        what = f"{heads.model}, {num_pages} pages of {block_size}{', through a buffer' if hazards else ''}"
        return self._moved("page copy", what, right, num_bytes, milliseconds, copy_bandwidth)

    def _moved(self, operation: str, case: str, right: bool, num_bytes: int, milliseconds: float, copy_bandwidth: float) -> Row:
        bandwidth = gigabytes_per_second(num_bytes, milliseconds)
        return Row(operation, case, 0.0 if right else float("inf"), "right" if right else "WRONG", milliseconds, bandwidth, bandwidth / copy_bandwidth)

    def checks(self, quick: bool) -> Iterator[Row]:
        """Slot mapping against Python's integers (R8.4); attention of mixed batches and of decodes against float64, by dtype, head size and window."""
        yield self._check_slots()
        shapes = [(9, 3, 64), (32, 8, 128), (4, 1, 256), (8, 8, 80), (8, 2, 32)]
        batches = {"decodes": ([1] * 4, [1000, 17, 64, 1]), "mixed": ([70, 1, 0, 33], [300, 40, 9, 33])}
        for dtype in TOLERANCES:
            wanted = shapes if dtype == self.dtype and not quick else shapes[:2]
            for place, shape in enumerate(wanted):
                for name, (query_lens, seq_lens) in batches.items():
                    for window in (None, 100) if place == 0 else (None,):
                        yield self._check_attention(name, query_lens, seq_lens, dtype, shape, window)

    def _check_slots(self) -> Row:
        block_size, lengths = 16, [40, 1, 17]
        table, _ = page_table(len(lengths), 3, self.device)
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        mapping = torch.zeros(sum(lengths) + 5, dtype=torch.int64, device=self.device)
        kernels.compute_slot_mapping(starts, positions, table, mapping, block_size=block_size, backend=self.backend)
        rows = table.tolist()
        expected = [rows[r][p // block_size] * block_size + p % block_size for r, length in enumerate(lengths) for p in range(length)] + [-1] * 5
        right = mapping.tolist() == expected
        return Row("slot mapping", f"{len(lengths)} requests, blocks of {block_size}", 0.0 if right else float("inf"), "right" if right else "WRONG")

    def _check_attention(
        self, name: str, query_lens: list[int], seq_lens: list[int], dtype: torch.dtype, shape: tuple[int, int, int], window: int | None
    ) -> Row:
        num_q_heads, num_kv_heads, head_dim = shape
        block_size = 16
        table, num_blocks = page_table(len(seq_lens), -(-max(seq_lens) // block_size), self.device)
        caches = [random_normal((num_blocks, block_size, num_kv_heads, head_dim), dtype, self.device) for _ in range(2)]
        query = random_normal((sum(query_lens), num_q_heads, head_dim), dtype, self.device)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(self.device)
        batch = (query, *caches, table, starts, torch.tensor(seq_lens, dtype=torch.int32, device=self.device))
        out = kernels.paged_attention(*batch, scale=head_dim**-0.5, sliding_window=window, backend=self.backend)
        error = attention_error(out, *batch, scale=head_dim**-0.5, sliding_window=window)
        case = f"{name}, {str(dtype).removeprefix('torch.')}, heads {num_q_heads}/{num_kv_heads} of {head_dim}, window {window or 'none'}"
        return Row("attention", case, error, _verdict(error, TOLERANCES[dtype], None))


def gigabytes_per_second(num_bytes: int, milliseconds: float) -> float:
    return num_bytes / milliseconds / 1e6


def _verdict(error: float, tolerance: float, share: float | None) -> str:
    if not error <= tolerance:  # NaN is wrong too
        return f"WRONG (more than {tolerance:g})"
    return "right" if share is None else f"right, goal of {GOAL:.0%} {'reached' if share >= GOAL else 'missed'}"


def rows(bench: Bench, budget: Budget, copy_bandwidth: float, quick: bool) -> Iterator[Row]:
    """Everything that fits into the budget, and into the GPU's memory, smallest first."""
    yield from bench.checks(quick)
    work: list[tuple[str, int, Callable[[], Row]]] = []
    for heads in (LLAMA, SMOLLM2):
        for num_tokens in (64, 8192) if quick else (64, 1024, 8192, 65536):
            size = write_bytes(num_tokens, heads, bench.dtype.itemsize)
            work.append((f"KV write of {num_tokens} tokens", size, lambda n=num_tokens, h=heads: bench.write(n, h, copy_bandwidth)))
    for hazards in (False, True):
        for block_size in (16, 32):
            size = copy_bytes(4096, block_size, LLAMA, bench.dtype.itemsize)
            work.append((f"copy of {4096} pages", size, lambda b=block_size, z=hazards: bench.copy(4096, LLAMA, copy_bandwidth, b, z)))
    work.sort(key=lambda item: item[1])
    work += [(f"decode, {case}", case.num_bytes, lambda case=case: bench.decode(case, copy_bandwidth)) for case in decode_cases(quick)]
    for name, num_bytes, measure in work:
        done: list[Row] = []

        def one(measure: Callable[[], Row] = measure, done: list[Row] = done) -> None:
            done.append(measure())

        try:
            budget.run(name, max(num_bytes, bench.flush_bytes), one)
        except torch.OutOfMemoryError:
            budget.dropped.append(f"{name} (out of memory)")
        yield from done
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def summary(measured: list[Row], budget: Budget) -> Iterator[str]:
    """What the table says, in a few sentences."""
    wrong = [row for row in measured if "WRONG" in row.verdict]
    goals = [row for row in measured if "goal" in row.verdict]
    reached = sum("reached" in row.verdict for row in goals)
    yield f"{len(measured) - len(wrong)} of {len(measured)} results are right."
    if goals:
        yield f"{reached} of {len(goals)} decodes of {LONG_CONTEXT} tokens and more reach {GOAL:.0%} of the copy's bandwidth."
    if budget.dropped:
        yield f"Dropped, because time or memory ran out: {'; '.join(budget.dropped)}."


def about_device() -> Iterator[str]:
    """The GPU and what drives it."""
    import subprocess

    import triton

    properties = torch.cuda.get_device_properties(0)
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        driver = asked.stdout.strip().splitlines()[0] if asked.returncode == 0 and asked.stdout.strip() else "unknown"
    except OSError:
        driver = "unknown"
    yield (
        f"{properties.name}: compute capability {properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, {properties.L2_cache_size / 2**20:.0f} MiB of cache"
    )
    yield f"driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}, Triton {triton.__version__}"


def main(arguments: list[str] | None = None) -> int:
    """0; 1 when a result is wrong; 2, with one sentence, where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description="The compiled kernels on a GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, about a minute")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"drop the largest cases rather than take longer (default {SECONDS:.0f})")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    budget = Budget(options.seconds)
    for line in about_device():
        print(line, flush=True)
    bench = Bench("cuda", kernels.choose_backend(device="cuda"), EventTimer(), flush_bytes=4 * torch.cuda.get_device_properties(0).L2_cache_size)
    copy_bandwidth = bench.copy_bandwidth(min(2**31, torch.cuda.mem_get_info()[0] // 4))
    print(f"device-to-device copy: {copy_bandwidth:.0f} GB/s, read and written", flush=True)
    print(Row.HEADER, flush=True)
    measured = []
    for row in rows(bench, budget, copy_bandwidth, options.quick):
        measured.append(row)
        print(row, flush=True)
    for sentence in summary(measured, budget):
        print(sentence)
    return 1 if any("WRONG" in row.verdict for row in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
