"""What a run of the paper's engine is given: settings and requests, each of which becomes a sequence group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from engine.errors import InvalidInput

PreemptionMode = Literal["auto", "swap", "recompute"]
"""How a preempted group's blocks come back (section 4.5). ``auto``: groups of several sequences are swapped, others recomputed, as vLLM's first release did."""

MIN_BEAM_WIDTH, MAX_BEAM_WIDTH = 2, 8
MAX_SAMPLES = 16


@dataclass(frozen=True)
class PaperConfig:
    """The engine's settings. Sizes in blocks and tokens; block ids are 0 to num_blocks-1, there is no null block.

    `num_cpu_blocks`: the swap space. `free_queue_order`: these ids are handed out first, in this order. `watermark`: share of the pool that stays free when
    groups are admitted. `kernel_witness`: as in `engine.session_config.SessionConfig`. Blocks that are freed go to the head of the free queue, as in vLLM's
    first release, whose free list was a stack.
    """

    num_blocks: int
    block_size: int
    num_cpu_blocks: int = 0
    preemption_mode: PreemptionMode = "auto"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int | None = None
    watermark: float = 0.0
    free_queue_order: tuple[int, ...] = ()
    attention_shares: bool = False
    kernel_witness: bool | None = None
    seed: int = 0
    max_frames: int = 20_000

    def __post_init__(self) -> None:
        """Raises InvalidInput for a size below 1, a negative swap space, an unknown way to preempt, or an impossible free queue order."""
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_frames"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, but it must be at least 1")
        if self.num_cpu_blocks < 0:
            raise InvalidInput(f"num_cpu_blocks is {self.num_cpu_blocks}, but a swap space has 0 blocks or more")
        if self.preemption_mode not in get_args(PreemptionMode):
            raise InvalidInput(f"preemption_mode is {self.preemption_mode!r}, but it is one of {', '.join(get_args(PreemptionMode))}")
        if not 0 <= self.watermark < 1:
            raise InvalidInput(f"watermark is {self.watermark}, but it is a share of the pool: at least 0 and below 1")
        order = self.free_queue_order
        if len(set(order)) != len(order) or any(not 0 <= b < self.num_blocks for b in order):
            raise InvalidInput(f"free_queue_order is {list(order)}, but it must name each block at most once, with ids from 0 to {self.num_blocks - 1}")

    def described(self) -> Mapping[str, Any]:
        """All settings as plain data for a trace's header."""
        return {"engine": "paper", **asdict(self), "free_queue_order": list(self.free_queue_order)}


@dataclass(frozen=True)
class PaperRequestSpec:
    """A request and when it arrives: before iteration `arrival_step` (counted from 1) is scheduled. It becomes a sequence group.

    `n` samples (1: a plain request), or with `beam_width` a beam search of that many candidates, `n` then counts the returned ones. Sequences are called
    `request_id` when there is one, else `request_id` + 1, 2, … in order of birth. `prefix_id`: the provider's prefix that the prompt begins with.
    `forced_token_ids[i]`: outputs of sample i that the scenario dictates. `forced_beams[t]`: the survivors of
    selection t, each as (index of the parent among the living beams, token id).
    `seed`: of the first sample; sample i draws with seed + i. `length_penalty`: a finished beam's score is its log-probability / (outputs ** length_penalty).
    `is_prefix`: the request is such a prefix itself: computed once, then kept, without outputs.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    arrival_step: int = 1
    max_tokens: int = 16
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[tuple[int, ...], ...] = ()
    forced_beams: tuple[tuple[tuple[int, int], ...], ...] = ()
    prefix_id: str | None = None
    is_prefix: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInput for numbers that cannot be."""
        if not self.prompt_token_ids:
            raise InvalidInput(f"request {self.request_id} has no prompt: give it at least one token")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise InvalidInput(f"request {self.request_id}: n is {self.n}, but a request has 1 to {MAX_SAMPLES} samples")
        if self.beam_width is not None and not MIN_BEAM_WIDTH <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidInput(f"request {self.request_id}: beam_width is {self.beam_width}, but it must be {MIN_BEAM_WIDTH} to {MAX_BEAM_WIDTH}")
        if self.beam_width is not None and self.temperature:
            raise InvalidInput(f"request {self.request_id}: beam search takes the most probable candidates and draws nothing; leave temperature out")
        if self.beam_width is not None and self.n > self.beam_width:
            raise InvalidInput(f"request {self.request_id}: n is {self.n}, but a beam search of width {self.beam_width} cannot return more than that")
        if not 0 <= self.temperature < math.inf:
            raise InvalidInput(f"request {self.request_id}: temperature is {self.temperature}, but it must be a number from 0 on")
        if not math.isfinite(self.length_penalty):
            raise InvalidInput(f"request {self.request_id}: length_penalty is {self.length_penalty}, but it must be a number")
        if self.max_tokens < 1 and not self.is_prefix:
            raise InvalidInput(f"request {self.request_id}: max_tokens is {self.max_tokens}, but a request must produce at least 1 token")
        if len(self.forced_token_ids) > self.n or (self.forced_token_ids and self.beam_width is not None):
            raise InvalidInput(f"request {self.request_id}: force outputs for at most its {self.n} samples, and for beams name the survivors in force_beams")
