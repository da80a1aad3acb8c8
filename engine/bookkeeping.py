"""Runs a step without a model: tables, slots, states and forced tokens, no tensors.

For scenarios that only ask what the memory manager decides. It keeps rows and slots as the real worker does, with any number of KV-cache groups, and
says in every event that nothing was computed (`backend` "none", 0 layers).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.core.kv_cache_spec import KVCacheSpec, MambaSpec
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.trace.events import BlocksCopied, Cause, CauseKind, Emit, Fact, KVWritten, RowUpdated, SlotsMapped, StateWritten
from engine.trace.frame import WorkerRow


@dataclass(frozen=True)
class ContextParallelism:
    """How the tokens of a block are dealt out to ranks: `interleave_size` tokens to each in turn. `rank` is the one whose memory is shown."""

    world_size: int = 1
    rank: int = 0
    interleave_size: int = 1


def slot_of(position: int, row: Sequence[int], block_size: int, parallelism: ContextParallelism, rank: int) -> int:
    """Where `rank` keeps the token at `position`, -1 when another rank does (R8.4). `block_size`: tokens of one block on one rank."""
    size, interleave = parallelism.world_size, parallelism.interleave_size
    block, offset = divmod(position, block_size * size)
    if offset // interleave % size != rank:
        return -1
    return row[block] * block_size + offset // (size * interleave) * interleave + offset % interleave


class BookkeepingRunner:
    """A worker without a model. Every output token comes from `forced_token_ids`.

    `specs`: one per KV-cache group. Groups of recurrent states have no slots: they write a state per step (R8.5). With several ranks the slots of each are
    mapped, and what is written is written on the rank that is shown.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], emit: Emit, parallelism: ContextParallelism | None = None) -> None:
        self.slot_mapping: tuple[int, ...] = ()
        """Slot per token of the last step's batch, in the first attention group, on the rank that is shown."""
        self._specs = tuple(specs)
        self._parallelism = parallelism or ContextParallelism()
        self._emit = emit
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._params: dict[str, SamplingParams] = {}
        self._num_prompt_tokens: dict[str, int] = {}

    def rows(self) -> tuple[WorkerRow, ...]:
        """The rows in batch order."""
        return tuple(WorkerRow(row, request_id, tuple(tuple(t) for t in tables)) for row, (request_id, tables) in enumerate(self._tables.items()))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Rows, copies, slots, writes, tokens, in the order of R8.6. Mutates its rows and tokens."""
        computed = self._update_rows(scheduler_output)
        self._copy(scheduler_output.kv_cache_block_copies)
        batch = [(r, list(range(computed[r], computed[r] + n))) for r, n in scheduler_output.num_scheduled_tokens.items()]
        self.slot_mapping = tuple(slot for group_id in self._attention_groups()[:1] for r, positions in batch for slot in self._slots(r, group_id, positions))
        for group_id in self._attention_groups():
            self._map(group_id, batch)
        for group_id, spec in enumerate(self._specs):
            for request_id, positions in batch:
                if isinstance(spec, MambaSpec):
                    self._write_states(request_id, group_id, spec, positions)
                else:
                    self._write(request_id, group_id, positions)
        return ModelRunnerOutput({request_id: self._sample(request_id, positions) for request_id, positions in batch})

    # ------------------------------------------------------------------ slots and states
    def _attention_groups(self) -> list[int]:
        return [group_id for group_id, spec in enumerate(self._specs) if not isinstance(spec, MambaSpec)]

    def _group(self, group_id: int) -> int | None:
        """The group as events name it: only when there are several."""
        return group_id if len(self._specs) > 1 else None

    def _slots(self, request_id: str, group_id: int, positions: list[int], rank: int | None = None) -> list[int]:
        row, size = self._tables[request_id][group_id], self._specs[group_id].block_size
        rank = self._parallelism.rank if rank is None else rank
        return [slot_of(position, row, size, self._parallelism, rank) for position in positions]

    def _map(self, group_id: int, batch: list[tuple[str, list[int]]]) -> None:
        ranks = range(self._parallelism.world_size)
        for request_id, positions in batch:
            for rank in ranks:
                facts: dict[str, Fact] = {"dcp_rank": rank} if len(ranks) > 1 else {}
                self._emit(
                    SlotsMapped(
                        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP, facts),
                        request_id=request_id,
                        group_id=self._group(group_id),
                        positions=positions,
                        slots=self._slots(request_id, group_id, positions, rank),
                        token_ids=self._ids(request_id, positions),
                    )
                )

    def _write(self, request_id: str, group_id: int, positions: list[int]) -> None:
        here = [(p, slot) for p, slot in zip(positions, self._slots(request_id, group_id, positions), strict=True) if slot >= 0]
        if not here:
            return  # all tokens of this step belong to other ranks
        facts: dict[str, Fact] = {"dcp_rank": self._parallelism.rank} if self._parallelism.world_size > 1 else {}
        self._emit(
            KVWritten(
                cause=Cause(CauseKind.SLOT_MAPPING, facts),
                request_id=request_id,
                group_id=self._group(group_id),
                slots=[slot for _, slot in here],
                token_ids=self._ids(request_id, [p for p, _ in here]),
                num_layers=0,
                backend="none",
            )
        )

    def _write_states(self, request_id: str, group_id: int, spec: MambaSpec, positions: list[int]) -> None:
        """The states that this step leaves behind: in mode ``all`` one at the end of each block and after the last token, otherwise the last one."""
        row = self._tables[request_id][group_id]
        for block_id, num_tokens in _states(row, spec, positions[0], positions[-1] + 1):
            cause = Cause(CauseKind.BLOCK_TABLE_LOOKUP)
            self._emit(StateWritten(cause=cause, request_id=request_id, group_id=self._group(group_id), block_id=block_id, num_tokens=num_tokens))

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            cause = Cause(CauseKind.COPY_QUEUED)
            self._emit(BlocksCopied(cause=cause, source_block_ids=[s for s, _ in pairs], destination_block_ids=[d for _, d in pairs]))

    # ------------------------------------------------------------------ tokens
    def _ids(self, request_id: str, positions: list[int]) -> list[int]:
        return [self._tokens[request_id][p] for p in positions]

    def _sample(self, request_id: str, positions: list[int]) -> list[SampledToken]:
        tokens = self._tokens[request_id]
        if positions[-1] + 1 < len(tokens):
            return []  # still inside the prefill, or recomputing after a preemption
        token_id = self._params[request_id].forced_token_ids[len(tokens) - self._num_prompt_tokens[request_id]]
        tokens.append(token_id)
        return [SampledToken(token_id, Cause(CauseKind.FORCED))]

    # ------------------------------------------------------------------ rows
    def _update_rows(self, output: SchedulerOutput) -> dict[str, int]:
        """Follow the scheduler's tables (R8.2, R8.3); returns num_computed_tokens per scheduled request."""
        computed: dict[str, int] = {}
        for request_id in sorted(output.finished_req_ids | output.preempted_req_ids):
            if request_id in self._tables:
                row = list(self._tables).index(request_id)
                del self._tables[request_id]
                for group_id in range(len(self._specs)):
                    self._row_event(request_id, group_id, row, 0, [], CauseKind.LEFT_BATCH)
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self._params[new.req_id] = new.sampling_params
            computed[new.req_id] = new.num_computed_tokens
            self._add_row(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = num_computed
            if request_id in cached.resumed_req_ids:
                self._tables.pop(request_id, None)
                self._add_row(request_id, block_ids or tuple([] for _ in self._specs))
            elif block_ids is not None:
                self._append(request_id, block_ids)
        return computed

    def _add_row(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        self._tables[request_id] = tuple(list(ids) for ids in block_ids)
        row = list(self._tables).index(request_id)
        for group_id, ids in enumerate(block_ids):
            self._row_event(request_id, group_id, row, 0, ids, CauseKind.ADDED_TO_BATCH)

    def _append(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        row = list(self._tables).index(request_id)
        for group_id, (table, ids) in enumerate(zip(self._tables[request_id], block_ids, strict=True)):
            if ids:
                start = len(table)
                table.extend(ids)
                self._row_event(request_id, group_id, row, start, ids, CauseKind.APPENDED)

    def _row_event(self, request_id: str, group_id: int, row: int, start: int, block_ids: list[int], kind: CauseKind) -> None:
        self._emit(RowUpdated(cause=Cause(kind), request_id=request_id, group_id=group_id, row=row, start=start, block_ids=list(block_ids)))


def _states(row: list[int], spec: MambaSpec, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Block and prefix length of each state that computing the tokens start..end-1 writes. Null blocks take none."""
    size = spec.block_size
    if spec.mamba_cache_mode == "none":
        yield row[0], end
        return
    ends = [*range((start // size + 1) * size, end, size), end] if spec.mamba_cache_mode == "all" else [end]
    for num_tokens in ends:
        block_id = row[-(-num_tokens // size) - 1]
        if block_id:
            yield block_id, num_tokens
