"""The kernels of one step launched again on what a layer was given, with everything written down: grids, lines, programs, and how each softmax grew."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.errors import EngineError
from engine.trace.closeup import LaneCloseup, LaunchCloseup, RowProgress, TileStep
from engine.trace.witness import runs_of
from engine.worker.kernel_lines import LinesRun, counted_lines
from engine.worker.layer_capture import LayerInputs
from kernels import (
    AttentionMetadata,
    Backend,
    LaneProgress,
    LaunchShape,
    ProgramAccess,
    Progress,
    Witness,
    compute_slot_mapping,
    copy_blocks,
    paged_attention,
    recorded_launches,
    reshape_and_cache,
)


@dataclass
class Relaunch:
    """`launches`: in the order in which they ran; `slots`: what the slot-mapping kernel found, per token of the batch; `output`: float [num_tokens,
    num_q_heads, head_dim] of the attention kernel; the caches as they are after the writes."""

    launches: list[LaunchCloseup] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    key_cache: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    value_cache: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@torch.inference_mode()
def launch_again(
    inputs: LayerInputs, request_ids: Sequence[str], copies: Sequence[tuple[int, int]], *, max_num_batched_tokens: int, backend: Backend
) -> Relaunch:
    """All kernels of the step, in its order (R8.6): page copies, slot mapping, KV write, attention. Leaves `inputs` as they are.

    request_ids: whose the rows of the block table are. copies: (source, destination) of the pages that the step copied before; they are copied in caches of
    their own, because `inputs` are from after it. max_num_batched_tokens: room of the slot mapping, whose rest is padded. backend: one that interprets.
    """
    batch = _Batch(inputs.query_start_loc.tolist(), list(request_ids))
    done = Relaunch(key_cache=inputs.key_cache.clone(), value_cache=inputs.value_cache.clone())
    if copies:
        done.launches += _copy(inputs, copies, backend)
    slot_mapping = torch.full((max(max_num_batched_tokens, batch.num_tokens),), -1, dtype=torch.int64)
    done.launches += _map_slots(inputs, slot_mapping, batch, backend)
    slots = slot_mapping[: batch.num_tokens]
    done.slots = slots.tolist()
    done.launches += _write(inputs, slots, done, batch, backend)
    done.launches += _attend(inputs, done, batch, backend)
    return done


@dataclass(frozen=True)
class _Batch:
    """Whose the tokens of the batch are."""

    starts: list[int]
    request_ids: list[str]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def by_request(self, tokens: Iterable[int]) -> dict[str | None, list[int]]:
        """The tokens in their order, by request; None: places behind the batch."""
        found: dict[str | None, list[int]] = defaultdict(list)
        for token in tokens:
            row = next((row for row, end in enumerate(self.starts[1:]) if token < end), None)
            found[None if row is None else self.request_ids[row]].append(token)
        return found


def _recorded(launch: Callable[[], object]) -> tuple[list[LaunchShape], LinesRun]:
    """Run `launch` and tell which kernels it launched and which of their lines ran."""
    # A program that a GPU's host reserves and no query needs divides nothing by nothing, and stores none of it.
    with recorded_launches() as shapes, counted_lines(shapes) as lines, np.errstate(invalid="ignore"):
        launch()
    return shapes, lines


def _closeups(shapes: Sequence[LaunchShape], lines: LinesRun) -> list[LaunchCloseup]:
    return [
        LaunchCloseup(
            kernel=shape.kernel,
            grid=shape.grid,
            lanes=shape.lanes,
            constants=dict(shape.constants),
            lines=lines.lines_of(place, shape.kernel),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        for place, shape in enumerate(shapes)
    ]


def _programs(shape: LaunchCloseup) -> int:
    programs = 1
    for size in shape.grid:
        programs *= size
    return programs


# ---------------------------------------------------------------------- what moves keys and values


def _copy(inputs: LayerInputs, copies: Sequence[tuple[int, int]], backend: Backend) -> list[LaunchCloseup]:
    caches = [torch.zeros_like(inputs.key_cache), torch.zeros_like(inputs.value_cache)]
    pairs = torch.tensor(list(copies), dtype=torch.int64)
    witness = Witness()
    launches = _closeups(*_recorded(lambda: copy_blocks([caches[0]], [caches[1]], pairs, witness=witness, backend=backend)))
    accesses = witness.launches[-1].programs or ()
    block_size = inputs.key_cache.shape[1]
    for launch in launches:
        texts: dict[int, list[str]] = defaultdict(list)
        for access in accesses:
            sources, targets = (", ".join(_blocks(slots, block_size)) for slots in (access.key_slots_read, access.key_slots_written))
            if launch.constants.get("GATHER") and launch.constants.get("SCATTER"):
                texts[access.program].append(f"keys and values of block {sources} to block {targets}")
            elif launch.constants.get("GATHER"):
                texts[access.program].append(f"keys and values of block {sources} to the buffer")
            else:
                texts[access.program].append(f"keys and values to block {targets}")
        launch.programs_of.extend("; ".join(texts.get(program, ["nothing"])) for program in range(_programs(launch)))
    return launches


def _blocks(slots: Sequence[int], block_size: int) -> list[str]:
    return [str(block) for block in dict.fromkeys(slot // block_size for slot in slots)]


def _map_slots(inputs: LayerInputs, slot_mapping: torch.Tensor, batch: _Batch, backend: Backend) -> list[LaunchCloseup]:
    from kernels.pointer_trace import WatchedTensor, watching

    watched = WatchedTensor(slot_mapping, (0,), exact=1)
    with watching([watched]):
        shapes, lines = _recorded(
            lambda: compute_slot_mapping(
                inputs.query_start_loc, inputs.positions, inputs.block_table, slot_mapping, block_size=inputs.key_cache.shape[1], backend=backend
            )
        )
    launches = _closeups(shapes, lines)
    written: dict[int, list[int]] = defaultdict(list)
    for touched in watched.writes:
        written[touched.program] += touched.indices[0].tolist()
    for program in range(_programs(launches[0])):
        parts = [
            f"{request_id}: slots of the batch's {_span('token', tokens)}" if request_id is not None else f"-1 at the unused {_span('place', tokens)}"
            for request_id, tokens in batch.by_request(sorted(set(written[program]))).items()
        ]
        launches[0].programs_of.append("; ".join(parts) or "nothing")
    return launches


def _write(inputs: LayerInputs, slots: torch.Tensor, done: Relaunch, batch: _Batch, backend: Backend) -> list[LaunchCloseup]:
    witness = Witness()
    shapes, lines = _recorded(lambda: reshape_and_cache(inputs.key, inputs.value, done.key_cache, done.value_cache, slots, witness=witness, backend=backend))
    launches = _closeups(shapes, lines)
    accesses: dict[int, list[ProgramAccess]] = defaultdict(list)
    for access in witness.launches[-1].programs or ():
        accesses[access.program].append(access)
    for program in range(_programs(launches[0])):
        slot_of = {token: slot for access in accesses[program] for token, slot in zip(access.tokens, access.key_slots_written, strict=True)}
        parts = [
            f"{request_id}: {_span('token', tokens)} to {_span('slot', [slot_of[token] for token in tokens])}"
            for request_id, tokens in batch.by_request(slot_of).items()
        ]
        launches[0].programs_of.append("; ".join(parts) or "nothing")
    return launches


def _span(what: str, numbers: Sequence[int]) -> str:
    """“token 3”, “tokens 3 to 5, 8”."""
    parts = [str(start) if end == start + 1 else f"{start} to {end - 1}" for start, end in runs_of(numbers)]
    return f"{what}{'s' if len(numbers) != 1 else ''} {', '.join(parts)}"


# ---------------------------------------------------------------------- attention


def _attend(inputs: LayerInputs, done: Relaunch, batch: _Batch, backend: Backend) -> list[LaunchCloseup]:
    witness, progress = Witness(), Progress()
    metadata = AttentionMetadata(
        block_table=inputs.block_table,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        slot_mapping=inputs.slot_mapping,
        max_seq_len=int(inputs.seq_lens.max()),  # the host knows it, so a GPU's keys are not split for rows that nobody fills
    )

    def attend() -> None:
        done.output = paged_attention(
            inputs.query,
            done.key_cache,
            done.value_cache,
            inputs.block_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            scale=inputs.scale,
            sliding_window=inputs.sliding_window,
            metadata=metadata,
            witness=witness,
            progress=progress,
            backend=backend,
        )

    shapes, lines = _recorded(attend)
    launches = _closeups(shapes, lines)
    told = progress.launches[-1]
    if told is None:
        raise EngineError("The attention kernel told nothing of its softmax: the backend does not interpret; this is a bug in Pagewalk.")
    accesses = {(access.program, access.lane): access for access in witness.launches[-1].programs or ()}
    lanes = {(lane.program, lane.lane): lane for lane in told.lanes}
    block_size, num_kv_heads = inputs.key_cache.shape[1:3]
    attention = next(launch for launch in launches if launch.kernel == "paged_attention_kernel")
    splits = attention.grid[1] if len(attention.grid) > 1 else 1
    for place in range(told.grid * told.lanes_per_program):
        where = divmod(place, told.lanes_per_program)
        if where in lanes:
            lane = lanes[where]
            tiles = _tiles(lane, accesses.get(where), told.tile_size, block_size, inputs.sliding_window)
            attention.attention.append(_lane(lane, tiles, batch.request_ids[lane.request]))
        else:
            attention.attention.append(LaneCloseup(*where, None, None, [], 0, place // splits % num_kv_heads, [], []))
    for launch in launches:
        if launch.kernel == "reduce_splits_kernel":
            launch.programs_of.extend(_reduced(launch, attention, splits, num_kv_heads))
    return launches


def _reduced(launch: LaunchCloseup, attention: LaunchCloseup, splits: int, num_kv_heads: int) -> Iterator[str]:
    """A program puts together what the splits found for one query, whose lanes lie one behind the other, in one query head."""
    blocks, heads = launch.grid
    for block, head in itertools.product(range(blocks), range(heads)):
        lane = attention.attention[block * num_kv_heads * splits]
        yield f"{lane.request_id}: token {lane.tokens[0]}, query head {head}, from {splits} splits" if lane.tokens else "nothing"


def _lane(lane: LaneProgress, tiles: list[TileStep], request_id: str) -> LaneCloseup:
    return LaneCloseup(
        program=lane.program,
        lane=lane.lane,
        request_id=request_id,
        row=lane.request,
        tokens=list(lane.tokens),
        first_position=lane.first_position,
        kv_head=lane.kv_head,
        tiles=tiles,
        rows=[RowProgress(row.token, row.q_head, list(row.maxima), list(row.totals)) for row in lane.rows],
    )


def _tiles(lane: LaneProgress, access: ProgramAccess | None, tile_size: int, block_size: int, sliding_window: int | None) -> list[TileStep]:
    """What the lane was seen to read, cut into its tiles: it reads a key for each of the positions that any of its queries may see, in their order."""
    slots = access.key_slots_read if access is not None else ()
    end = lane.first_position + len(lane.tokens)
    start = 0 if sliding_window is None else max(0, lane.first_position - sliding_window + 1)
    found: list[TileStep] = []
    taken = 0
    for tile in lane.tiles:
        first, last = max(start, tile * tile_size), min(end, (tile + 1) * tile_size)
        its = slots[taken : taken + last - first]
        taken += len(its)
        found.append(
            TileStep(
                positions=(first, last),
                columns=(first // block_size, (last - 1) // block_size + 1),
                block_ids=list(dict.fromkeys(slot // block_size for slot in its)),
                slots=runs_of(its),
            )
        )
    if taken != len(slots) or sum(step.positions[1] - step.positions[0] for step in found) != taken:
        raise EngineError(
            f"Program {lane.program} was seen to read {len(slots)} keys, but walked tiles of {taken}: one slot stands twice in a row of the block table, or "
            "the kernel is wrong; please report this scenario."
        )
    return found
