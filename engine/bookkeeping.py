"""Runs a step without a model: tables, slots and forced tokens, no tensors.

For scenarios that only ask what the memory manager decides. It keeps rows and slots as the real worker does and says in every event that nothing
was computed (`backend` "none", 0 layers).
"""

from __future__ import annotations

from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.trace.events import Cause, CauseKind, Emit, KVWritten, RowUpdated, SlotsMapped
from engine.trace.frame import WorkerRow


class BookkeepingRunner:
    """A worker with one KV-cache group and no model. Every output token comes from `forced_token_ids`."""

    def __init__(self, block_size: int, emit: Emit) -> None:
        self.slot_mapping: tuple[int, ...] = ()
        self._block_size = block_size
        self._emit = emit
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._params: dict[str, SamplingParams] = {}
        self._num_prompt_tokens: dict[str, int] = {}

    def rows(self) -> tuple[WorkerRow, ...]:
        """The rows in batch order."""
        return tuple(WorkerRow(row, request_id, (tuple(table),)) for row, (request_id, table) in enumerate(self._tables.items()))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Update rows, compute slots, report the writes, and dictate the tokens. Mutates its rows and tokens."""
        computed = self._update_rows(scheduler_output)
        batch: list[tuple[str, list[int], list[int]]] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            start = computed[request_id]
            positions = list(range(start, start + num_tokens))
            table = self._tables[request_id]
            slots = [table[p // self._block_size] * self._block_size + p % self._block_size for p in positions]
            batch.append((request_id, positions, slots))
        self.slot_mapping = tuple(slot for _, _, slots in batch for slot in slots)
        for request_id, positions, slots in batch:
            cause = Cause(CauseKind.BLOCK_TABLE_LOOKUP)
            self._emit(SlotsMapped(cause=cause, request_id=request_id, positions=positions, slots=slots, token_ids=self._ids(request_id, positions)))
        for request_id, positions, slots in batch:
            token_ids = self._ids(request_id, positions)
            self._emit(KVWritten(cause=Cause(CauseKind.SLOT_MAPPING), request_id=request_id, slots=slots, token_ids=token_ids, num_layers=0, backend="none"))
        return ModelRunnerOutput({request_id: self._sample(request_id, positions) for request_id, positions, _ in batch})

    def _ids(self, request_id: str, positions: list[int]) -> list[int]:
        return [self._tokens[request_id][p] for p in positions]

    def _sample(self, request_id: str, positions: list[int]) -> list[SampledToken]:
        tokens = self._tokens[request_id]
        if positions[-1] + 1 < len(tokens):
            return []  # still inside the prefill, or recomputing after a preemption
        token_id = self._params[request_id].forced_token_ids[len(tokens) - self._num_prompt_tokens[request_id]]
        tokens.append(token_id)
        return [SampledToken(token_id, Cause(CauseKind.FORCED))]

    def _update_rows(self, output: SchedulerOutput) -> dict[str, int]:
        """Follow the scheduler's tables (R8.2, R8.3); returns num_computed_tokens per scheduled request."""
        computed: dict[str, int] = {}
        for request_id in sorted(output.finished_req_ids | output.preempted_req_ids):
            if request_id in self._tables:
                row = list(self._tables).index(request_id)
                del self._tables[request_id]
                self._emit(RowUpdated(cause=Cause(CauseKind.LEFT_BATCH), request_id=request_id, group_id=0, row=row, start=0, block_ids=[]))
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self._params[new.req_id] = new.sampling_params
            computed[new.req_id] = new.num_computed_tokens
            self._add_row(new.req_id, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = num_computed
            if request_id in cached.resumed_req_ids:
                self._tables.pop(request_id, None)
                self._add_row(request_id, block_ids[0] if block_ids else [])
            elif block_ids and block_ids[0]:
                table = self._tables[request_id]
                start = len(table)
                table.extend(block_ids[0])
                self._row_event(request_id, start, block_ids[0], CauseKind.APPENDED)
        return computed

    def _add_row(self, request_id: str, block_ids: list[int]) -> None:
        self._tables[request_id] = list(block_ids)
        self._row_event(request_id, 0, block_ids, CauseKind.ADDED_TO_BATCH)

    def _row_event(self, request_id: str, start: int, block_ids: list[int], kind: CauseKind) -> None:
        row = list(self._tables).index(request_id)
        self._emit(RowUpdated(cause=Cause(kind), request_id=request_id, group_id=0, row=row, start=start, block_ids=list(block_ids)))
