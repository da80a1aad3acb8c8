"""The memory simulation once more, iteration by iteration and slot by slot: slow and plain. What the event-driven one computes must equal this exactly."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from engine.paper.reservation import System
from engine.paper.workload import WorkloadRequest
from tests.property.dumb_buddy import DumbBuddy

PARTS = ("token_states", "reservation", "internal", "rounding", "free")


@dataclass
class Life:
    """A request while it is here. `slots`: its slots in order; `wanted`: how many it asked for, the rest is the allocator's rounding."""

    request: WorkloadRequest
    generated: int = 0
    slots: list[int] = field(default_factory=list)
    wanted: int = 0

    def labels(self) -> list[str]:
        """What every slot holds."""
        states = self.request.prompt_len + self.generated
        total = self.request.prompt_len + self.request.output_len
        names = []
        for i in range(len(self.slots)):
            names.append("token_states" if i < states else "reservation" if i < total else "internal" if i < self.wanted else "rounding")
        return names


@dataclass
class NaiveResult:
    all: Counter[str] = field(default_factory=Counter)
    while_waiting: Counter[str] = field(default_factory=Counter)
    batch_sizes: list[tuple[int, int]] = field(default_factory=list)
    num_iterations: int = 0
    num_iterations_waiting: int = 0
    num_preemptions: int = 0
    end: int = 0
    slots_at: dict[int, dict[str, list[tuple[int, str]]]] = field(default_factory=dict)
    """Iteration -> request id -> (slot, what it holds) in order."""


class NaiveSimulation:
    def __init__(self, system: System, num_slots: int, block_size: int, max_model_len: int, max_num_seqs: int, watermark_blocks: int) -> None:
        self.system, self.num_slots, self.block_size = system, num_slots, block_size
        self.max_model_len, self.max_num_seqs, self.watermark_blocks = max_model_len, max_num_seqs, watermark_blocks
        self.buddy = DumbBuddy(num_slots)
        self.free_blocks = list(range(num_slots // block_size))
        self.running: list[Life] = []
        self.waiting: list[Life] = []
        self.result = NaiveResult()

    def run(self, requests: list[WorkloadRequest], max_iterations: int | None = None) -> NaiveResult:
        """All requests must be servable. `max_iterations`: stop early (for timing)."""
        coming = sorted(requests, key=lambda r: r.arrival)
        now = 0
        while (coming or self.waiting or self.running) and now != max_iterations:
            while coming and coming[0].arrival <= now:
                self.waiting.append(Life(coming.pop(0)))
            preempted = self.grow() if self.system == "paged" else False
            while not preempted and self.waiting and len(self.running) < self.max_num_seqs and self.place(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
            for life in self.running:
                life.generated += 1
            self.account(now)
            for life in list(self.running):
                if life.generated == life.request.output_len:
                    self.running.remove(life)
                    self.give_back(life)
            now += 1
        return self.result

    def grow(self) -> bool:
        """Running requests, in order, get a block for their next token where they need one; the latest are preempted for it. Whether that happened."""
        preempted = False
        for life in list(self.running):
            while life in self.running and life.request.prompt_len + life.generated + 1 > len(life.slots):
                if self.free_blocks:
                    self.take(life, 1)
                else:
                    latest = self.running.pop()
                    self.give_back(latest)
                    self.waiting.insert(0, latest)
                    self.result.num_preemptions += 1
                    preempted = True
        return preempted

    def take(self, life: Life, num_blocks: int) -> None:
        for block in self.free_blocks[:num_blocks]:
            life.slots += range(block * self.block_size, (block + 1) * self.block_size)
        del self.free_blocks[:num_blocks]
        life.wanted = len(life.slots)

    def place(self, life: Life) -> bool:
        request = life.request
        if self.system == "paged":
            needed = math.ceil((request.prompt_len + life.generated + 1) / self.block_size)
            if len(self.free_blocks) - needed < (self.watermark_blocks if self.running else 0):
                return False
            self.take(life, needed)
            return True
        power = 1
        while power < request.output_len:
            power *= 2
        life.wanted = {
            "orca_max": self.max_model_len,
            "orca_pow2": min(request.prompt_len + power, self.max_model_len),
            "orca_oracle": request.prompt_len + request.output_len,
        }[self.system]
        start = self.buddy.allocate(life.wanted)
        if start is None:
            return False
        life.slots = list(range(start, start + self.buddy.chunks[start]))
        return True

    def give_back(self, life: Life) -> None:
        if self.system == "paged":
            self.free_blocks = [slot // self.block_size for slot in life.slots[:: self.block_size]] + self.free_blocks
        else:
            self.buddy.free(life.slots[0])
        life.slots = []

    def account(self, now: int) -> None:
        if not self.running:
            if self.result.batch_sizes and self.result.batch_sizes[-1][1]:
                self.result.batch_sizes.append((now, 0))
            return
        labels = Counter(label for life in self.running for label in life.labels())
        labels["free"] = self.num_slots - sum(len(life.slots) for life in self.running)
        labels["batch"] = len(self.running)
        self.result.all += labels
        self.result.num_iterations += 1
        if self.waiting:
            self.result.while_waiting += labels
            self.result.num_iterations_waiting += 1
        if not self.result.batch_sizes or self.result.batch_sizes[-1][1] != len(self.running):
            self.result.batch_sizes.append((now, len(self.running)))
        self.result.slots_at[now] = {life.request.request_id: list(zip(life.slots, life.labels(), strict=True)) for life in self.running}
        self.result.end = now + 1
