"""Runs an iteration of the paper's engine without a model: rows, slots, copies and forced tokens, no tensors.

For scenes that only ask what the memory manager decides. It says in every event that nothing was computed (`backend` "none", 0 layers), and gives no
log-probabilities: beams need a scenario that forces them.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.output import SampledToken
from engine.errors import InvalidInput
from engine.iteration_check import check_plan, slots_of
from engine.paper.config import PaperConfig
from engine.paper.step import IterationPlan, ScheduledSequence, SequenceOutput
from engine.row_change import row_change
from engine.trace.events import BlocksCopied, Cause, CauseKind, Emit, KVWritten, RowUpdated, SlotsMapped
from engine.trace.frame import WorkerRow


class PaperBookkeepingRunner:
    """A worker without a model: `engine.paper.step.IterationRunner`. `emit` None records nothing. Rows are kept as `engine.worker.input_batch` keeps them:
    the lowest empty row is taken first, and the last rows move down into gaps."""

    def __init__(self, config: PaperConfig, emit: Emit | None = None) -> None:
        self.slot_mapping: tuple[int, ...] = ()
        """Slot per token of the last iteration's batch, in order of rows."""
        self._config = config
        self._emit_or_none = emit
        self._rows: list[tuple[str, list[int]] | None] = []

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows, ascending."""
        return tuple(WorkerRow(i, row[0], (tuple(row[1]),)) for i, row in enumerate(self._rows) if row is not None)

    def execute(self, plan: IterationPlan) -> dict[str, SequenceOutput]:
        """Rows, copies, slots, writes, tokens. Mutates the rows. Swapped pages hold no values here, so nothing is done about them.

        Raises EngineError for a plan that cannot be run, and InvalidInput where a token would have to be drawn, both before anything has changed.
        """
        check_plan(plan, block_size=self._config.block_size, num_blocks=self._config.num_blocks)
        outputs = {sequence.sequence_id: SequenceOutput(_forced(sequence)) for sequence in plan.sequences}
        self._update_rows(plan.sequences)
        if plan.copies:
            sources, destinations = [source for source, _ in plan.copies], [destination for _, destination in plan.copies]
            self._emit(BlocksCopied(cause=Cause(CauseKind.SHARED_BLOCK_WRITTEN), source_block_ids=sources, destination_block_ids=destinations))
        sequences = {sequence.sequence_id: sequence for sequence in plan.sequences}
        batch = [sequences[row.request_id] for row in self.rows()]
        self.slot_mapping = tuple(slot for sequence in batch for slot in slots_of(sequence, self._config.block_size))
        for sequence in batch:
            self._emit(_mapped(sequence, self._config.block_size))
        for sequence in batch:
            self._emit(_written(sequence, self._config.block_size))
        return outputs

    # ------------------------------------------------------------------ rows
    def _update_rows(self, sequences: Sequence[ScheduledSequence]) -> None:
        staying = {sequence.sequence_id for sequence in sequences}
        for i, row in enumerate(self._rows):
            if row is not None and row[0] not in staying:
                self._rows[i] = None
                self._report(row[0], i, 0, [], Cause(CauseKind.LEFT_BATCH))
        for sequence in sequences:
            self._write_row(sequence)
        self._condense()

    def _write_row(self, sequence: ScheduledSequence) -> None:
        name = sequence.sequence_id
        for i, row in enumerate(self._rows):
            if row is not None and row[0] == name:
                start, cause = row_change(row[1], sequence.block_ids)
                if cause is not None:
                    row[1][start:] = sequence.block_ids[start:]
                    self._report(name, i, start, row[1][start:], cause)
                return
        if None not in self._rows:
            self._rows.append(None)
        i = self._rows.index(None)
        self._rows[i] = (name, list(sequence.block_ids))
        self._report(name, i, 0, sequence.block_ids, Cause(CauseKind.ADDED_TO_BATCH))

    def _condense(self) -> None:
        while None in self._rows:
            last = self._rows.pop()
            if last is not None:
                target = self._rows.index(None)
                self._rows[target] = last
                self._report(last[0], target, 0, last[1], Cause(CauseKind.ADDED_TO_BATCH, {"from_row": len(self._rows)}))

    def _report(self, name: str, row: int, start: int, block_ids: Sequence[int], cause: Cause) -> None:
        self._emit(RowUpdated(cause=cause, request_id=name, group_id=0, row=row, start=start, block_ids=list(block_ids)))

    def _emit(self, event: BlocksCopied | KVWritten | RowUpdated | SlotsMapped) -> None:
        if self._emit_or_none is not None:
            self._emit_or_none(event)


def _forced(sequence: ScheduledSequence) -> tuple[SampledToken, ...]:
    tokens = []
    for params, name in zip(sequence.draws, sequence.draw_names, strict=True):
        if sequence.num_output_tokens >= len(params.forced_token_ids):
            raise InvalidInput(
                f"No model runs, so every token must be forced, but {name} has only {len(params.forced_token_ids)}; "
                "force more tokens, lower max_tokens or name a model."
            )
        tokens.append(SampledToken(params.forced_token_ids[sequence.num_output_tokens], Cause(CauseKind.FORCED)))
    return tuple(tokens)


def _span(sequence: ScheduledSequence) -> slice:
    return slice(sequence.num_computed_tokens, sequence.num_computed_tokens + sequence.num_scheduled_tokens)


def _mapped(sequence: ScheduledSequence, block_size: int) -> SlotsMapped:
    span = _span(sequence)
    return SlotsMapped(
        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP),
        request_id=sequence.sequence_id,
        group_id=0,
        positions=list(range(span.start, span.stop)),
        slots=slots_of(sequence, block_size),
        token_ids=list(sequence.token_ids[span]),
    )


def _written(sequence: ScheduledSequence, block_size: int) -> KVWritten:
    return KVWritten(
        cause=Cause(CauseKind.SLOT_MAPPING),
        request_id=sequence.sequence_id,
        group_id=0,
        slots=slots_of(sequence, block_size),
        token_ids=list(sequence.token_ids[_span(sequence)]),
        num_layers=0,
        backend="none",
    )
