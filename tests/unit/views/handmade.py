"""Figure 6 of the PagedAttention paper as a trace made by hand, for tests of what is drawn and said. No screen ever shows it.

Block numbers, texts and fill counts are the figure's (prompt of 7 tokens, physical blocks 7, 1 and 3 of 9, 4 slots each); digests are made up.
"""

from __future__ import annotations

from typing import Any

from engine.trace import events as e
from engine.trace.events import AnyEvent, Cause, CauseKind
from engine.trace.frame import BlockOwner, BlockState, Counters, Frame, RequestState, Trace, TraceHeader

TEXTS = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
VOCABULARY = {100 + i: text for i, text in enumerate(TEXTS)}
TOKENS = tuple(VOCABULARY)
HASHES = ("8d4c7c" + "0" * 58, "ed6fa5" + "1" * 58)
NUM_BLOCKS = 9
QUEUE = (7, 1, 3, 2, 4, 5, 6, 8)


class Maker:
    """Keeps the state of one request A and a pool, and appends a frame per event. Blocks that did not change stay the same object."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.queue: list[int] = list(QUEUE)
        self.table: list[int] = []
        self.hashed: dict[int, str] = {}
        self.content: dict[int, list[int | None]] = {b: [None] * 4 for b in range(NUM_BLOCKS)}
        self.num_tokens = 0
        self.num_computed = 0
        self.status = "WAITING"
        self.step = 0
        self._blocks: dict[int, BlockState] = {}

    def emit(self, op: str, event: AnyEvent) -> None:
        blocks = tuple(self._block(b) for b in range(NUM_BLOCKS))
        requests: tuple[RequestState, ...] = ()
        if self.num_tokens:
            requests = (
                RequestState("A", self.status, 7, TOKENS[: self.num_tokens], self.num_computed, (tuple(self.table),), HASHES[: self.num_tokens // 4], (None,)),
            )
        running = ("A",) if self.status == "RUNNING" else ()
        waiting = ("A",) if self.status == "WAITING" and requests else ()
        hash_map = tuple((f"{h}:0", (b,)) for b, h in self.hashed.items())
        op_index = (self.frames[-1].op_index + (op != self.frames[-1].op)) if self.frames else 0
        self.frames.append(
            Frame(len(self.frames), self.step, op, op_index, event, blocks, tuple(self.queue), hash_map, requests, running, waiting, (), (), {}, Counters())
        )

    def _block(self, block_id: int) -> BlockState:
        owners = tuple(BlockOwner("A", 0, i) for i, b in enumerate(self.table) if b == block_id)
        tokens = tuple(self.content[block_id])
        key = self.hashed.get(block_id)
        state = BlockState(
            block_id, len(owners), block_id == 0, (f"{key}:0",) if key else (), 4 if key else None, sum(t is not None for t in tokens), tokens, owners
        )
        if self._blocks.get(block_id) != state:
            self._blocks[block_id] = state
        return self._blocks[block_id]

    def take(self, block_ids: list[int], num_tokens: int) -> None:
        facts: dict[str, Any] = {
            "num_tokens": num_tokens, "num_required": -(-num_tokens // 4), "num_held": len(self.table), "num_free": len(self.queue),
        }  # fmt: skip
        assert self.queue[: len(block_ids)] == block_ids
        del self.queue[: len(block_ids)]
        self.table += block_ids
        self.emit("schedule", e.BlocksAllocated(cause=Cause(CauseKind.HEAD_OF_FREE_QUEUE, facts), request_id="A", group_id=0, block_ids=block_ids))

    def cache(self, logical: int) -> None:
        self.hashed[self.table[logical]] = HASHES[logical]
        self.emit(
            "schedule",
            e.BlockCached(
                cause=Cause(CauseKind.BLOCK_FULL, {"logical_index": logical, "num_tokens": 4 * logical + 4}), request_id="A", group_id=0,
                block_id=self.table[logical], block_hash=HASHES[logical], parent_hash=HASHES[logical - 1] if logical else None,
                token_ids=list(TOKENS[4 * logical : 4 * logical + 4]),
            ),
        )  # fmt: skip

    def compute(self, positions: list[int]) -> None:
        token_ids = [TOKENS[p] for p in positions]
        slots = [self.table[p // 4] * 4 + p % 4 for p in positions]
        self.num_computed = positions[-1] + 1
        cause = Cause(CauseKind.BLOCK_TABLE_LOOKUP)
        self.emit("execute_model", e.SlotsMapped(cause=cause, request_id="A", group_id=0, positions=positions, slots=slots, token_ids=token_ids))
        for slot, token in zip(slots, token_ids, strict=True):
            self.content[slot // 4][slot % 4] = token
        cause = Cause(CauseKind.SLOT_MAPPING)
        self.emit("execute_model", e.KVWritten(cause=cause, request_id="A", group_id=0, slots=slots, token_ids=token_ids, num_layers=4, backend="torch"))
        self.emit(
            "execute_model",
            e.AttentionComputed(
                cause=Cause(CauseKind.COMPARED_WITH_REFERENCE, {"layer": 0}), backend="torch", layers=[0], agrees_within=1e-6,
                query_lens=[len(positions)], seq_lens=[positions[-1] + 1], request_ids=["A"],
            ),
        )  # fmt: skip

    def sample(self) -> None:
        position = self.num_tokens
        self.num_tokens += 1
        cause = Cause(CauseKind.GREEDY, {"probability": 0.93})
        hashes = self.num_tokens // 4
        self.emit("update_from_output", e.TokenSampled(cause=cause, request_id="A", token_id=TOKENS[position], position=position, num_block_hashes=hashes))


def figure_6() -> Trace:
    """The whole figure: prompt into blocks 7 and 1, `fathers` into block 1, `brought` into block 3, then everything is given back."""
    m = Maker()
    m.emit("start", e.TraceStarted(cause=Cause(CauseKind.SCENARIO), num_blocks=NUM_BLOCKS, block_size=4))
    m.num_tokens = 7
    arrival = Cause(CauseKind.SCENARIO, {"what": "arrival"})
    m.emit("add_request A", e.RequestAdded(cause=arrival, request_id="A", num_prompt_tokens=7, num_block_hashes=1))
    m.step = 1
    m.emit("schedule", e.StepStarted(cause=Cause(CauseKind.NEXT_STEP, {"num_running": 0, "num_waiting": 1}), token_budget=64))
    m.take([7, 1], 7)
    m.cache(0)
    m.status = "RUNNING"
    m.compute(list(range(7)))
    m.sample()
    m.step = 2
    m.cache(1)
    m.compute([7])
    m.sample()
    m.step = 3
    m.take([3], 9)
    m.compute([8])
    m.sample()
    m.status = "FINISHED_LENGTH_CAPPED"
    m.emit("update_from_output", e.RequestFinished(cause=Cause(CauseKind.MAX_TOKENS, {"max_tokens": 3}), request_id="A", reason="length"))
    m.table, m.queue = [], [3, 2, 4, 5, 6, 8, 1, 7]
    m.content[3] = [None] * 4
    m.emit(
        "update_from_output",
        e.BlocksFreed(
            cause=Cause(CauseKind.REQUEST_FINISHED, {"reason": "length"}), request_id="A", block_ids=[3, 1, 7], prepended=[3], appended=[1, 7],
            still_referenced=[],
        ),
    )  # fmt: skip
    header = TraceHeader(
        {"id": "figure-6", "title": "Figure 6"}, {"num_blocks": NUM_BLOCKS, "block_size": 4}, {"name": "tiny"}, {"name": "torch"}, {}, 0, dict(VOCABULARY)
    )
    return Trace(header, m.frames, True)
