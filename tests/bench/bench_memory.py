"""Figure 2 recomputed: what 15,728 slots hold under four systems, 10,000 requests each, and how long computing it takes: `python -m tests.bench.bench_memory`.

Goal: all four systems in under 5 s on one core. The peer is the simulation that looks at every slot in every iteration (the tests' witness, made
to be plain and not to be fast), on the first requests of the same workload, in the same process. CPU time.
"""

from __future__ import annotations

import time

from engine.paper.memory_model import PAPER_NUM_SLOTS
from engine.paper.memory_simulation import WATERMARK, compare, simulate
from engine.paper.quoted import FIGURE_2, FIGURE_13
from engine.paper.reservation import SYSTEM_NAMES, SYSTEMS, System
from engine.paper.workload import Workload, at_once, repeated
from scenarios.workloads import load_workload
from tests.unit.paper_memory.naive_simulation import NaiveSimulation

NUM_REQUESTS = 10_000
GOAL_SECONDS = 5.0
PEER_REQUESTS = 20
NAMES = ("sharegpt-like", "alpaca-like", "azure-conversation", "azure-code")
PAPERS = {"sharegpt-like": "sharegpt", "alpaca-like": "alpaca"}


def table(name: str) -> None:
    workload = repeated(at_once(load_workload(name)), NUM_REQUESTS)
    begin = time.process_time()
    results = compare(workload, num_slots=PAPER_NUM_SLOTS)
    seconds = time.process_time() - begin
    refused = len(next(iter(results.values())).refused)
    print(f"{workload.name}: {len(workload.requests):,} requests, {refused:,} refused as too long; four systems in {seconds:.2f} s (goal {GOAL_SECONDS:.0f} s)")
    print(f"  {'% of slots':14} {'states':>15} {'reserved':>15} {'internal':>15} {'external':>15} {'batch':>16} {'iterations':>11} {'preempted':>9}")
    for system, result in results.items():
        parts = []
        for part in ("token_states", "reservation", "internal", "external"):
            quoted = FIGURE_2[system].get(part) if name == "sharegpt-like" else None
            paper = "" if quoted is None else f"({quoted.value:.1f}{'?' if quoted.unconfirmed else ''})"
            parts.append(f"{getattr(result.shares_while_waiting, part):6.1f} {paper:>8}")
        paper = f"({FIGURE_13[PAPERS[name]][system].value:.2f})" if name in PAPERS else ""
        print(
            f"  {SYSTEM_NAMES[system]:14} {' '.join(parts)} {result.mean_batch_size_while_waiting:7.2f} {paper:>8}"
            f" {result.num_iterations:11,} {result.num_preemptions:9,}"
        )
    print()


def peer() -> None:
    workload = load_workload("sharegpt-like")
    part = Workload(workload.name, workload.source, workload.requests[:PEER_REQUESTS])
    print(f"The same {PEER_REQUESTS} requests, slot by slot in every iteration and from event to event:")
    for system in SYSTEMS:
        slow = timed_naive(system, part)
        begin = time.process_time()
        for _ in range(20):
            simulate(part, system, num_slots=PAPER_NUM_SLOTS)
        quick = (time.process_time() - begin) / 20
        print(f"  {SYSTEM_NAMES[system]:14} {slow:7.2f} s {quick * 1000:8.2f} ms {slow / quick:8,.0f} times faster")


def timed_naive(system: System, part: Workload) -> float:
    naive = NaiveSimulation(system, PAPER_NUM_SLOTS, 16, 2048, 256, int(WATERMARK * (PAPER_NUM_SLOTS // 16)))
    begin = time.process_time()
    naive.run(list(part.requests))
    return time.process_time() - begin


def main() -> None:
    print("In parentheses what the paper reports (Figure 2, and Figure 13 for the batch), ? where nobody could be found who printed it.")
    print("Shares and batch are means over the iterations in which somebody waits.\n")
    for name in NAMES:
        table(name)
    peer()


if __name__ == "__main__":
    main()
