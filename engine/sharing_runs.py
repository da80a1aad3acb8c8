"""How many blocks sharing saves, counted while the paper's engine really runs a model, but records nothing: a few hundred iterations in seconds.

`engine.paper.sharing.measure_sharing` counts the same in the frames of a recorded run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import InvalidInput
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.sharing import Sharing, SharingPoint
from engine.paper.step import IterationPlan
from engine.runner import PaperRunnerChoice
from engine.trace.events import Event


@dataclass(frozen=True)
class SharingRun:
    """`together`: over all requests. `each`: request by request, in their order."""

    together: Sharing
    each: tuple[Sharing, ...]


def run_and_measure_sharing(
    requests: Sequence[PaperRequestSpec],
    config: PaperConfig,
    model_name: str,
    backend: str | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> SharingRun:
    """Run all requests to their ends, together, and count blocks in each iteration when it is planned. `progress` is told the share that is done, 0 to 1.

    The pool must hold all of them at once: what is swapped out or computed again would not be counted. Raises InvalidInput for requests that the engine
    cannot serve, for a pool that is too small, and for whatever else a session refuses.
    """
    scheduler = PaperScheduler(config)
    choice = PaperRunnerChoice(config, model_name, backend, ())
    for index, spec in enumerate(requests):
        scheduler.check_request(spec, (*requests[:index], *requests[index + 1 :]))
        choice.check_token_ids(spec.request_id, spec.prompt_token_ids)
        scheduler.add_request(spec)
    runner = choice.make(_ignore)
    names = [spec.request_id for spec in requests]
    together: list[SharingPoint] = []
    each: dict[str, list[SharingPoint]] = {name: [] for name in names}
    longest = max(spec.max_tokens for spec in requests)
    step = 0
    while scheduler.has_unfinished_requests():
        step += 1
        plan = scheduler.schedule()
        if not plan.sequences or scheduler.swapped or (step > 1 and scheduler.waiting):
            raise InvalidInput(f"{config.num_blocks} blocks or {config.max_num_seqs} seats are too few for all requests at once: give the run more of them")
        group_of = {sequence_id: sequence.group.request_id for sequence_id, sequence in scheduler.sequences.items()}
        together.append(_point(step, plan, names, group_of))
        for name in names:
            point = _point(step, plan, [name], group_of)
            if point.blocks_without:
                each[name].append(point)
        scheduler.update_from_output(runner.execute(plan))
        progress(min(1.0, step / longest))
    return SharingRun(Sharing(tuple(together)), tuple(Sharing(tuple(each[name])) for name in names))


def _point(step: int, plan: IterationPlan, names: Sequence[str], group_of: dict[str, str]) -> SharingPoint:
    tables = [sequence.block_ids for sequence in plan.sequences if group_of[sequence.sequence_id] in names]
    return SharingPoint(step, len({block for table in tables for block in table}), sum(map(len, tables)))


def _ignore(event: Event) -> None:
    """Nobody listens."""
