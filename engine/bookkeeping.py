"""Runs a step without a model: tables, slots, states and forced tokens, no tensors.

For scenarios that only ask what the memory manager decides. It keeps rows and slots as the real worker does, with any number of KV-cache groups, and
says in every event that nothing was computed (`backend` "none", 0 layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.kv_cache_spec import KVCacheSpec, MambaSpec
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.plain_rows import PlainRows
from engine.state_steps import state_steps
from engine.trace.events import BlocksCopied, Cause, CauseKind, Emit, Fact, KVWritten, SlotsMapped, StateWritten
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
    mapped, and what is written is written on the rank that is shown. `clears_rows`: as `PlainRows` has it.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], emit: Emit, parallelism: ContextParallelism | None = None, *, clears_rows: bool = True) -> None:
        self.slot_mapping: tuple[int, ...] = ()
        """Slot per token of the last step's batch, in the first attention group, on the rank that is shown."""
        self._specs = tuple(specs)
        self._parallelism = parallelism or ContextParallelism()
        self._emit = emit
        self._rows = PlainRows(len(specs), emit, clears_rows=clears_rows)
        self._tokens: dict[str, list[int]] = {}
        self._params: dict[str, SamplingParams] = {}
        self._num_prompt_tokens: dict[str, int] = {}

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows, ascending."""
        return self._rows.rows()

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
        row, size = self._rows.table(request_id, group_id), self._specs[group_id].block_size
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
        row = self._rows.table(request_id, group_id)
        for step in state_steps(row, spec.block_size, spec.mamba_cache_mode, positions[0], positions[-1] + 1):
            cause = Cause(CauseKind.BLOCK_TABLE_LOOKUP)
            self._emit(StateWritten(cause=cause, request_id=request_id, group_id=self._group(group_id), **step._asdict()))

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
            self._rows.remove(request_id)
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self._params[new.req_id] = new.sampling_params
            computed[new.req_id] = new.num_computed_tokens
            self._rows.add(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = num_computed
            if request_id in cached.resumed_req_ids:
                self._rows.remove(request_id)
                self._rows.add(request_id, block_ids or tuple([] for _ in self._specs))
            elif block_ids is not None:
                self._rows.append(request_id, block_ids)
        self._rows.condense()
        return computed
