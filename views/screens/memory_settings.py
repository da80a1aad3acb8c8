"""What the memory screen is asked to compute: the requests, the memory, and how it is cut. Everything but an uploaded file stands in the address."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import streamlit as st

from engine.errors import InvalidInput
from engine.paper.memory_model import PAPER_NUM_SLOTS
from engine.paper.memory_simulation import SimulationResult, compare, simulate
from engine.paper.reservation import System
from engine.paper.simulation_log import Progress
from engine.paper.trace_files import read_trace
from engine.paper.workload import Workload, at_once, repeated
from scenarios.workloads import load_workload, workload_names
from views import state

FILE = "file"
MAX_NUM_SEQS = 256
BLOCK_SIZES = tuple(2**k for k in range(9))
LONGEST = tuple(2**k for k in range(8, 18))
REQUESTS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000)
MIN_SLOTS, MAX_SLOTS = 512, 4_194_304


@dataclass(frozen=True)
class Settings:
    """What is chosen on screen. `num_slots`: token slots of KV cache; `longest`: the longest sequence that the model takes."""

    workload: str = "sharegpt-like"
    num_slots: int = PAPER_NUM_SLOTS
    longest: int = 2048
    block_size: int = 16
    num_requests: int = 2_000


@dataclass(frozen=True)
class Upload:
    """The last file that could be read."""

    digest: str
    workload: Workload


NAMES: Mapping[str, str] = {"workload": "workload", "slots": "num_slots", "longest": "longest", "block": "block_size", "requests": "num_requests"}
"""In the address, and in Settings."""


def from_address() -> tuple[Settings, str | None]:
    """The settings that the address names, and one sentence about the first of them that cannot be used (its default stands in)."""
    settings, problem = Settings(), None
    for name, field in NAMES.items():
        if (text := st.query_params.get(name)) is None:
            continue
        try:
            settings = replace(settings, **{field: _value(name, text)})
        except InvalidInput as error:
            problem = problem or str(error)
    return settings, problem


def to_address(settings: Settings, part: str, first_part: str) -> None:
    """Say in the address what differs from the defaults, so that it can be passed on. An uploaded file cannot be."""
    wanted = {"screen": "memory"}
    if part != first_part:
        wanted["part"] = part
    for name, field in NAMES.items():
        if (value := getattr(settings, field)) not in (getattr(Settings(), field), FILE):
            wanted[name] = str(value)
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def requests_of(settings: Settings) -> tuple[Hashable, Workload]:
    """The requests that are used, all there from the start, under a key that says which they are."""
    upload: Upload | None = state.kept("memory:upload", None)
    if settings.workload == FILE and upload is not None:
        key: Hashable = (upload.digest, settings.num_requests)
        return key, state.remembered(("requests", key), lambda: at_once(repeated(upload.workload, settings.num_requests)))
    key = (settings.workload, settings.num_requests)
    return key, state.remembered(("requests", key), lambda: at_once(repeated(load_workload(settings.workload), settings.num_requests)))


def compared(settings: Settings, progress: Progress | None = None) -> dict[System, SimulationResult]:
    """All four systems on the chosen requests. Raises InvalidInput for settings that cannot be."""
    key, workload = requests_of(settings)
    sizes = {"num_slots": settings.num_slots, "block_size": settings.block_size, "max_model_len": settings.longest, "max_num_seqs": MAX_NUM_SEQS}
    return state.remembered(("compare", key, *sizes.values()), lambda: compare(workload, **sizes, progress=progress))


def simulated(settings: Settings, system: System, snapshot_at: int | None = None, progress: Progress | None = None) -> SimulationResult:
    """One system on the chosen requests, with the slots as they are in iteration `snapshot_at`."""
    key, workload = requests_of(settings)
    sizes = {"num_slots": settings.num_slots, "block_size": settings.block_size, "max_model_len": settings.longest, "max_num_seqs": MAX_NUM_SEQS}
    return state.remembered(
        ("simulate", key, system, *sizes.values(), snapshot_at),
        lambda: simulate(workload, system, **sizes, snapshot_at=snapshot_at, progress=progress),
    )


def read_upload(data: bytes, name: str, progress: Progress) -> Upload:
    """A file as a workload. Raises InvalidInput, with the line, for what cannot be read."""
    return Upload(hashlib.sha256(data).hexdigest(), read_trace(data, name, progress))


def _value(name: str, text: str) -> object:
    if name == "workload":
        if text not in workload_names():
            raise InvalidInput(f"there are no requests called “{text}”: the address may name {', '.join(workload_names())}")
        return text
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    choices = {"block": BLOCK_SIZES, "longest": LONGEST, "requests": REQUESTS}.get(name)
    if choices is not None and number not in choices:
        raise InvalidInput(f"the address says {name}={text}, but {name} is one of {', '.join(map(str, choices))}")
    if choices is None and not MIN_SLOTS <= number <= MAX_SLOTS:
        raise InvalidInput(f"the address says {name}={text}, but {name} is a number from {MIN_SLOTS:,} to {MAX_SLOTS:,}")
    return number
