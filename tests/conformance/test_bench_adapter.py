"""The adapter of the benchmark: what it decides is what real vLLM decides, and every group type can be measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.block_stack import GROUPS, Bench
from tests.conformance import bench_adapter

DECISIONS_OF_VLLM = "5c1f4e44e96805e9716b5afb4c633e00025e60f38ab594f085bc7372320efab9"
"""SHA-256 over every id, hash and hit of one pass of block_stack.py, recorded from vLLM 0.27.0 through vllm_bench_adapter.py."""


def test_a_whole_pass_decides_as_vllm_does() -> None:
    """Order of the queue after each operation, 31,250 hash values, hits of all group sets (R1.4 to R1.8, R2.1, R3.10, R3.20, R4.4)."""
    bench = Bench(bench_adapter)
    bench.pool()
    bench.cached_pool()
    bench.hashing()
    for name in GROUPS:
        bench.requests(name)
    assert bench.decisions.hexdigest() == DECISIONS_OF_VLLM


@pytest.mark.parametrize(
    ("groups", "num_hit"),
    [
        ([{"type": "full"}], 32),
        ([{"type": "mla"}], 32),
        ([{"type": "swa", "window": 8}], 32),
        ([{"type": "chunked", "chunk": 16}], 32),
        ([{"type": "rswa", "window": 8}], 32),
        ([{"type": "mamba", "mode": "all"}], 32),
        ([{"type": "full"}, {"type": "swa", "window": 8}], 32),
        ([{"type": "full", "block_size": 8}, {"type": "mamba", "mode": "all", "block_size": 16}], 32),
    ],
)
def test_every_group_type_prefills_decodes_and_is_hit(groups: list[dict[str, Any]], num_hit: int) -> None:
    """A second request with the same 34 tokens hits the largest multiple of all block sizes below them."""
    manager = bench_adapter.make_manager(64, 4, groups, 256, True)
    bench_adapter.next_step(manager)
    prompt = list(range(20))
    request = bench_adapter.add_request(manager, "first", prompt)
    # A chunked group's tokens before the current chunk count as hit without any lookup (R3.30).
    assert bench_adapter.prefill(manager, request, 20) == (16 if groups[0]["type"] == "chunked" else 0)
    for token in range(21, 34):
        bench_adapter.decode_step(manager, request, token)
    bench_adapter.finish(manager, request)
    bench_adapter.next_step(manager)
    again = bench_adapter.add_request(manager, "again", list(range(34)))
    assert bench_adapter.lookup(manager, again) == num_hit
    assert bench_adapter.prefill(manager, again, 34) == num_hit


def test_no_room_is_an_error() -> None:
    manager = bench_adapter.make_manager(4, 4, [{"type": "full"}], 64, True)
    request = bench_adapter.add_request(manager, "A", list(range(13)))
    with pytest.raises(RuntimeError, match="no room"):
        bench_adapter.prefill(manager, request, 1)


def test_importing_prints_nothing_and_loads_no_vllm() -> None:
    """The contract: a fresh process, the repository's root first in sys.path."""
    unwanted = "{'vllm', 'torch'} & set(sys.modules) or threading.active_count() - 1"
    code = f"import sys, threading; import tests.conformance.bench_adapter; sys.exit(str({unwanted}) if {unwanted} else 0)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
