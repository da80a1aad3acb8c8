"""The workloads that screens and benches offer by name: two synthetic ones with the paper's mean lengths, and extracts of four real traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import InvalidInput
from engine.paper.trace_files import read_trace
from engine.paper.workload import Workload, like_alpaca, like_sharegpt

TRACES = Path(__file__).parent / "traces"
NUM_SYNTHETIC_REQUESTS = 10_000


@dataclass(frozen=True)
class _Trace:
    file: str
    title: str
    source: str
    note: str

    def __call__(self) -> Workload:
        workload = read_trace((TRACES / self.file).read_bytes(), self.file)
        return replace(workload, name=self.title, source=self.source, note=self.note)


_AZURE = "Azure LLM inference traces 2023, CC-BY 4.0; cite Patel et al., Splitwise, ISCA 2024"
_MOONCAKE = "Mooncake traces (FAST 2025), Apache-2.0"

_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "sharegpt-like": lambda: like_sharegpt(NUM_SYNTHETIC_REQUESTS),
    "alpaca-like": lambda: like_alpaca(NUM_SYNTHETIC_REQUESTS),
    "azure-conversation": _Trace("azure_llm_2023_conv_first500.csv", "Azure conversations 2023", _AZURE, "The trace's first 500 requests."),
    "azure-code": _Trace("azure_llm_2023_code_first500.csv", "Azure code completion 2023", _AZURE, "The trace's first 500 requests."),
    "mooncake-conversation": _Trace("mooncake_conversation_first400.jsonl", "Mooncake conversations", _MOONCAKE, "The trace's first 400 requests of 12,031."),
    "mooncake-synthetic": _Trace(
        "mooncake_synthetic_first300.jsonl", "Mooncake synthetic", _MOONCAKE, "The trace's first 300 requests of 3,993, made from public data sets."
    ),
}


def workload_names() -> tuple[str, ...]:
    """Names for `load_workload`, the paper's two first."""
    return tuple(_WORKLOADS)


def load_workload(name: str) -> Workload:
    """A workload by name. Traces have their arrivals in seconds, the synthetic ones all at once. Raises InvalidInput for an unknown name."""
    if name not in _WORKLOADS:
        raise InvalidInput(f"the workload {name!r} is unknown: take one of {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]()
