"""How many blocks sharing saves: measured on a recorded run of the paper's engine, and for parallel sampling also from lengths alone (Figure 15)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import InvalidInput
from engine.paper.workload import Workload, WorkloadRequest
from engine.trace.events import StepScheduled
from engine.trace.frame import Frame


@dataclass(frozen=True)
class SharingPoint:
    """Iteration `step`. `blocks_with`: physical blocks that block tables name; `blocks_without`: entries of block tables, each of which would be a block of its
    own if nothing were shared."""

    step: int
    blocks_with: int
    blocks_without: int


@dataclass(frozen=True)
class Sharing:
    """Saved blocks over a run. `points`: one per iteration in which something ran."""

    points: tuple[SharingPoint, ...]

    @property
    def saved_percent(self) -> float:
        """(blocks without sharing - blocks with) / blocks without, both summed over the iterations; 0 where nothing ran."""
        without = sum(p.blocks_without for p in self.points)
        return 100 * (without - sum(p.blocks_with for p in self.points)) / without if without else 0.0


def measure_sharing(frames: Iterable[Frame]) -> Sharing:
    """Count in every iteration, at the moment when it is planned and its tables are as it will run them. Blocks that were swapped out are not counted.
    Frames of V1's engine can be counted alike."""
    points = []
    for frame in frames:
        if isinstance(frame.event, StepScheduled) and frame.scheduled:
            named = [block for block in frame.blocks if block.owners and not block.is_null]
            points.append(SharingPoint(frame.step, len(named), sum(len(block.owners) for block in named)))
    return Sharing(tuple(points))


def _block_iterations(num_tokens: int, block_size: int) -> int:
    """ceil(1/b) + ceil(2/b) + … + ceil(num_tokens/b): blocks times iterations of a sequence that grows from 1 token on."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def parallel_sampling_saved(requests: Workload | Sequence[WorkloadRequest], num_samples: int, block_size: int = 16) -> float:
    """Percent of blocks, times iterations, that `num_samples` outputs per request save by sharing the prompt (section 4.4).

    The samples of a request run together, all with its output length, so that arrivals do not matter. They share the full blocks of the prompt; a partial
    last block is copied for each of them when it writes its first token, so that it is never shared in an iteration. Raises InvalidInput for fewer than 1
    sample or slot.
    """
    if num_samples < 1 or block_size < 1:
        raise InvalidInput(f"num_samples is {num_samples} and block_size {block_size}, but both must be at least 1")
    listed = requests.requests if isinstance(requests, Workload) else requests
    without = saved = 0
    for r in listed:
        without += num_samples * (_block_iterations(r.prompt_len + r.output_len, block_size) - _block_iterations(r.prompt_len, block_size))
        saved += (num_samples - 1) * (r.prompt_len // block_size) * r.output_len
    return 100 * saved / without if without else 0.0
