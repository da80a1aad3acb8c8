"""A small but complete `KernelCloseup` for tests of drawings: made up, with numbers that fit together.

Two requests, A with 10 tokens of prefill in blocks 7, 1, 3 and B with its 6th token in blocks 5, 2 (the rows of R8.4), in blocks of 4 tokens; two KV heads of
two query heads each; tiles of 4 keys. Scores are drawn at random, and running maxima and sums follow from them by online softmax.
"""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path

from engine.trace.closeup import (
    Comparison,
    KernelCloseup,
    KernelSource,
    LaneCloseup,
    LaunchCloseup,
    RowProgress,
    TableRow,
    TileStep,
)
from engine.trace.slot_arithmetic import slot_arithmetic

BLOCK_SIZE = 4
TILE = 4
NUM_Q_HEADS = 4
NUM_KV_HEADS = 2
GROUP = NUM_Q_HEADS // NUM_KV_HEADS
HEAD_DIM = 8
ROOT = Path(__file__).resolve().parents[2]


@cache
def closeup_sample() -> KernelCloseup:
    """The close-up; every call gives the same one."""
    table = [
        TableRow(request_id="A", row=0, block_ids=[7, 1, 3], tokens=(0, 10), first_position=0, slots=[_slot([7, 1, 3], position) for position in range(10)]),
        TableRow(request_id="B", row=1, block_ids=[5, 2], tokens=(10, 11), first_position=5, slots=[_slot([5, 2], 5)]),
    ]
    queries = [(table[0], list(range(start, min(start + 4, 10)))) for start in (0, 4, 8)] + [(table[1], [10])]
    rng = random.Random(5)
    lanes = [_lane(row, tokens, kv_head, rng) for row, tokens in queries for kv_head in range(NUM_KV_HEADS)]
    on_gpu = [_placed(lane, program, 0) for program, lane in enumerate(lanes)]
    interpreted = [_placed(lane, 0, place) for place, lane in enumerate(lanes)]
    outputs = [[[rng.uniform(-1, 1) for _ in range(4)] for _ in range(NUM_Q_HEADS)] for _ in range(11)]
    difference = [[rng.uniform(0, 3e-7) for _ in range(NUM_Q_HEADS)] for _ in range(11)]
    return KernelCloseup(
        step=2,
        layer=0,
        num_layers=6,
        attention_layers=[0, 2, 4],
        group_id=0,
        block_size=BLOCK_SIZE,
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_window=None,
        scale=HEAD_DIM**-0.5,
        table=table,
        gpu=_launches(table, on_gpu, grid=len(lanes), lanes=1),
        interpreted=_launches(table, interpreted, grid=1, lanes=len(lanes)),
        sources=[
            _source("slot_mapping_kernel", "kernels/triton_cache.py"),
            _source("reshape_and_cache_kernel", "kernels/triton_cache.py"),
            _source("paged_attention_kernel", "kernels/triton_attention.py"),
        ],
        comparison=Comparison(
            reference=outputs,
            triton=[[[number + d for number in head] for head, d in zip(token, its, strict=True)] for token, its in zip(outputs, difference, strict=True)],
            num_shown=4,
            head_dim=HEAD_DIM,
            difference=difference,
            largest=max(max(its) for its in difference),
        ),
    )


def _slot(block_ids: list[int], position: int) -> int:
    return slot_arithmetic(position, block_ids, block_size=BLOCK_SIZE).slot


def _lane(row: TableRow, tokens: list[int], kv_head: int, rng: random.Random) -> LaneCloseup:
    first_position = row.first_position + tokens[0] - row.tokens[0]
    end = first_position + len(tokens)
    tiles = [
        TileStep(
            positions=(start, min(start + TILE, end)),
            columns=(start // BLOCK_SIZE, start // BLOCK_SIZE + 1),
            block_ids=[row.block_ids[start // BLOCK_SIZE]],
            slots=[(_slot(row.block_ids, start), _slot(row.block_ids, min(start + TILE, end) - 1) + 1)],
        )
        for start in range(0, end, TILE)
    ]
    rows = []
    for place, token in enumerate(tokens):
        for head in range(GROUP):
            scores = [rng.gauss(0, 3) if key <= first_position + place else -1e38 for key in range(end)]
            maxima, totals, maximum, total = [], [], -1e38, 0.0
            for start in range(0, end, TILE):
                new = max(maximum, *scores[start : start + TILE])
                total = total * 2 ** max(maximum - new, -1000.0) + sum(2 ** max(score - new, -1000.0) for score in scores[start : start + TILE])
                maximum = new
                maxima.append(maximum)
                totals.append(total)
            rows.append(RowProgress(token=token, q_head=kv_head * GROUP + head, maxima=maxima, totals=totals))
    return LaneCloseup(
        program=0, lane=0, request_id=row.request_id, row=row.row, tokens=tokens, first_position=first_position, kv_head=kv_head, tiles=tiles, rows=rows
    )


def _placed(lane: LaneCloseup, program: int, place: int) -> LaneCloseup:
    return LaneCloseup(program, place, lane.request_id, lane.row, lane.tokens, lane.first_position, lane.kv_head, lane.tiles, lane.rows)


def _launches(table: list[TableRow], lanes_of: list[LaneCloseup], *, grid: int, lanes: int) -> list[LaunchCloseup]:
    mapped = [f"{row.request_id}: positions {row.first_position} to {row.first_position + len(row.slots) - 1}" for row in table]
    padding = "padding: nothing left to fill"
    written = [f"{row.request_id}: token {token} to slot {slot}" for row in table for token, slot in zip(range(*row.tokens), row.slots, strict=True)]
    one_each = lanes == 1
    walks = sum(len(lane.tiles) for lane in lanes_of) if one_each else max(len(lane.tiles) for lane in lanes_of)
    return [
        LaunchCloseup(
            kernel="slot_mapping_kernel",
            grid=(3 if one_each else 2,),
            lanes=1 if one_each else 2,
            constants={"BLOCK_SIZE": BLOCK_SIZE, "KERNEL_BLOCK_SIZE": BLOCK_SIZE, "CP_WORLD_SIZE": 1, "PAD_SLOT_ID": -1},
            lines=_lines("slot_mapping_kernel", "kernels/triton_cache.py", 3 if one_each else 2, 2 if one_each else 1),
            programs_of=[*mapped, padding] if one_each else ["; ".join(mapped), padding],
        ),
        LaunchCloseup(
            kernel="reshape_and_cache_kernel",
            grid=(11 if one_each else 1,),
            lanes=1 if one_each else 16,
            constants={"BLOCK_SIZE": BLOCK_SIZE, "NUM_KV_HEADS": NUM_KV_HEADS, "HEAD_DIM": HEAD_DIM, "TOKENS": 1 if one_each else 16},
            lines=_lines("reshape_and_cache_kernel", "kernels/triton_cache.py", 11 if one_each else 1, 11 if one_each else 1),
            programs_of=written if one_each else ["; ".join(written)],
        ),
        LaunchCloseup(
            kernel="paged_attention_kernel",
            grid=(grid,),
            lanes=lanes,
            constants={
                "BLOCK_SIZE": BLOCK_SIZE,
                "NUM_KV_HEADS": NUM_KV_HEADS,
                "GROUP": GROUP,
                "HEAD_DIM": HEAD_DIM,
                "BLOCK_M": 8,
                "TILE": TILE,
                "ONE_TILE": False,
            },
            lines=_lines("paged_attention_kernel", "kernels/triton_attention.py", grid, walks),
            attention=lanes_of,
        ),
    ]


def _source(kernel: str, file: str) -> KernelSource:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"def {kernel}(")) - 1  # with the decorator
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("@")), len(lines))
    return KernelSource(kernel=kernel, file=file, first_line=start + 1, lines=[line.rstrip() for line in lines[start:end]])


def _lines(kernel: str, file: str, programs: int, walks: int) -> dict[int, int]:
    """Made up: every line of the body once per program, those in a loop once per walk, those under an `if` never."""
    source = _source(kernel, file)
    found: dict[int, int] = {}
    in_body, under = False, math.inf
    for place, line in enumerate(source.lines):
        depth = len(line) - len(line.lstrip())
        if not in_body:
            in_body = line == "):"
            continue
        if not line.strip() or line.strip().startswith(("#", '"')):
            continue
        under = under if depth > under else math.inf
        if depth > under:
            found[source.first_line + place] = 0
            continue
        found[source.first_line + place] = walks if depth >= 8 or line.strip().startswith("for ") else programs
        if line.strip().startswith("if "):
            under = depth
    return found
