"""State + event = next state for the paper's engine, from what the events say of themselves in `engine.trace.events` and nothing else.

Works on frames alone: the books are read off one frame, the next frame's event is applied, and the books of the next frame must come out. Events that move
nothing in these books (refusals, plans, the worker's) leave them as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.trace.events import (
    AnyEvent,
    BeamsChosen,
    BlocksAllocated,
    BlocksFreed,
    BlocksSwappedIn,
    BlocksSwappedOut,
    BlocksTouched,
    CopyQueued,
    PrefixKept,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    SequenceForked,
    StepScheduled,
    TokenSampled,
    TraceStarted,
)
from engine.trace.frame import Frame

END = {"stop": "FINISHED_STOPPED", "length": "FINISHED_LENGTH_CAPPED", "abort": "FINISHED_ABORTED", "dropped": "FINISHED_DROPPED"}


@dataclass
class PaperSequence:
    """Where one sequence stands. `group`: its request."""

    group: str
    status: str
    num_tokens: int
    num_computed_tokens: int
    parent: str | None
    table: list[int] = field(default_factory=list)
    cpu_table: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.status.startswith("FINISHED") or self.status == "PREFIX_KEPT"


@dataclass
class PaperBooks:
    """`free`: the GPU's queue, head first; `cpu_free`: the swap space's free blocks, sorted. `refs`, `cpu_refs`: of blocks that have references.
    `sequences`: in order of birth. `running`: sequences, `waiting` and `swapped`: requests; `running` sorted, since beams change places by rank."""

    free: list[int]
    cpu_free: list[int]
    refs: dict[int, int]
    cpu_refs: dict[int, int]
    sequences: dict[str, PaperSequence]
    running: list[str]
    waiting: list[str]
    swapped: list[str]

    def of_group(self, name: str | None) -> dict[str, PaperSequence]:
        """The sequences that go on of the request that is called `name` or has the sequence `name`."""
        assert name is not None
        group = self.sequences[name].group if name in self.sequences else name
        return {key: sequence for key, sequence in self.sequences.items() if sequence.group == group and not sequence.is_over}


def read_books(frame: Frame) -> PaperBooks:
    """The books of one frame."""
    return PaperBooks(
        free=list(frame.free_queue),
        cpu_free=sorted(frame.cpu_free_queue),
        refs={block.block_id: block.ref_cnt for block in frame.blocks if block.ref_cnt},
        cpu_refs={block.block_id: block.ref_cnt for block in frame.cpu_blocks if block.ref_cnt},
        sequences={
            r.request_id: PaperSequence(
                r.sequence_group or r.request_id, r.status, len(r.token_ids), r.num_computed_tokens, r.parent_id, list(r.block_ids[0]), list(r.cpu_block_ids)
            )
            for r in frame.requests
        },
        running=sorted(frame.running),
        waiting=list(frame.waiting),
        swapped=list(frame.swapped),
    )


def fold(books: PaperBooks, event: AnyEvent, groups: dict[str, str]) -> None:
    """Apply `event` to `books`. `groups`: the request of every sequence, which the names do not tell for sure."""
    match event:
        case TraceStarted() | BeamsChosen():
            pass  # the pool as the settings have it; forks, frees and tokens follow as events of their own
        case RequestAdded():
            assert event.request_id is not None
            group = groups[event.request_id]
            books.sequences[event.request_id] = PaperSequence(group, "WAITING", event.num_prompt_tokens, 0, None)
            books.waiting.append(group)
        case SequenceForked():
            _fork(books, event, groups)
        case BlocksTouched():
            if event.request_id is None:  # the scenario arranges the queue
                books.free = [b for b in books.free if b not in event.left_free_queue]
            else:
                sequence = books.sequences[event.request_id]
                sequence.table = list(event.block_ids)
                shared = event.cause.facts["num_tokens"]
                assert isinstance(shared, int)
                sequence.num_computed_tokens = shared
            _hold(books.refs, event.block_ids)
        case BlocksAllocated():
            assert event.request_id is not None
            _pop(books, event.block_ids)
            books.sequences[event.request_id].table += event.block_ids
        case CopyQueued():
            assert event.request_id is not None
            _pop(books, [event.destination_block_id])
            table = books.sequences[event.request_id].table
            assert table[event.logical_index] == event.source_block_id
            table[event.logical_index] = event.destination_block_id
            _let_go(books.refs, [event.source_block_id])
            assert event.source_block_id in books.refs, "a block that nobody else refers to is not copied"
        case BlocksFreed():
            if event.request_id is not None:
                assert books.sequences[event.request_id].table == event.block_ids
                books.sequences[event.request_id].table = []
            gone = _let_go(books.refs, event.block_ids)
            assert gone[::-1] == event.prepended
            assert set(event.still_referenced) == set(event.block_ids) - set(gone)
            books.free = [*event.prepended, *books.free]
        case BlocksSwappedOut():
            _swap_out(books, event)
        case BlocksSwappedIn():
            _swap_in(books, event)
        case _:
            _progress(books, event)


def _progress(books: PaperBooks, event: AnyEvent) -> None:
    if isinstance(event, StepScheduled):
        for name, num_tokens in event.num_scheduled_tokens.items():
            books.sequences[name].num_computed_tokens += num_tokens
    elif isinstance(event, TokenSampled):
        assert event.request_id is not None
        assert event.position == books.sequences[event.request_id].num_tokens
        books.sequences[event.request_id].num_tokens += 1
    elif isinstance(event, RequestAdmitted):
        for sequence in books.of_group(event.request_id).values():
            if sequence.group in books.waiting:
                sequence.status = "RUNNING"
        _move(books, event.request_id, "running")
    elif isinstance(event, RequestPreempted):
        for sequence in books.of_group(event.request_id).values():
            sequence.status = "PREEMPTED"
            if event.num_lost_tokens:
                sequence.num_computed_tokens = 0
        _move(books, event.request_id, "waiting" if event.num_lost_tokens else "swapped")
    elif isinstance(event, RequestFinished):
        assert event.request_id is not None
        sequence = books.sequences[event.request_id]
        books.cpu_free = sorted([*books.cpu_free, *_let_go(books.cpu_refs, sequence.cpu_table)])
        sequence.status, sequence.cpu_table = END[event.reason], []
        _leave(books, event.request_id)
    elif isinstance(event, PrefixKept):
        assert event.request_id is not None
        books.sequences[event.request_id].status = "PREFIX_KEPT"
        _leave(books, event.request_id)


def _fork(books: PaperBooks, event: SequenceForked, groups: dict[str, str]) -> None:
    name, parent = event.request_id, books.sequences[event.parent_id]
    assert name is not None
    if name in books.sequences:  # it waits, and its prompt begins with a kept prefix
        child = books.sequences[name]
        child.num_computed_tokens = parent.num_tokens
    else:
        assert groups[name] == parent.group
        child = books.sequences[name] = PaperSequence(parent.group, parent.status, parent.num_tokens, parent.num_computed_tokens, None)
        books.running = sorted([*books.running, name])
    assert event.block_ids == parent.table[: len(event.block_ids)]
    child.parent, child.table = event.parent_id, list(event.block_ids)
    _hold(books.refs, event.block_ids)


# ------------------------------------------------------------------ swapping
def _swap_out(books: PaperBooks, event: BlocksSwappedOut) -> None:
    """Each block once; a provider's prefix, whose full blocks are not among them, is let go of."""
    place = dict(zip(event.gpu_block_ids, event.cpu_block_ids, strict=True))
    books.cpu_free = sorted(set(books.cpu_free) - set(event.cpu_block_ids))
    let_go: list[int] = []
    for sequence in books.of_group(event.request_id).values():
        sequence.status = "SWAPPED"
        sequence.cpu_table = [place[b] for b in sequence.table if b in place]
        _hold(books.cpu_refs, sequence.cpu_table)
        let_go += sequence.table
        sequence.table = []
    gone = _let_go(books.refs, let_go)
    assert set(gone) == set(event.prepended)
    assert set(event.still_referenced) == set(let_go) - set(gone)
    books.free = [*event.prepended, *books.free]


def _swap_in(books: PaperBooks, event: BlocksSwappedIn) -> None:
    place = dict(zip(event.cpu_block_ids, event.gpu_block_ids, strict=True))
    assert books.free[: len(event.gpu_block_ids)] == event.gpu_block_ids
    del books.free[: len(event.gpu_block_ids)]
    for sequence in books.of_group(event.request_id).values():
        sequence.status = "RUNNING"
        sequence.table = [*event.shared_again, *(place[b] for b in sequence.cpu_table)]
        _hold(books.refs, sequence.table)
        books.cpu_free = sorted([*books.cpu_free, *_let_go(books.cpu_refs, sequence.cpu_table)])
        sequence.cpu_table = []
    _move(books, event.request_id, "running")


# ------------------------------------------------------------------ lists, references and the queue
def _move(books: PaperBooks, name: str | None, place: str) -> None:
    """The group goes to the front of the waiting or swapped requests, or its sequences run. Whoever gives way arrived before all that wait."""
    sequences = books.of_group(name)
    group = next(iter(sequences.values())).group
    books.running = [key for key in books.running if key not in sequences]
    books.waiting = [key for key in books.waiting if key != group]
    books.swapped = [key for key in books.swapped if key != group]
    if place == "running":
        books.running = sorted([*books.running, *sequences])
    else:
        getattr(books, place).insert(0, group)


def _leave(books: PaperBooks, name: str) -> None:
    """The sequence is over; a request without any that goes on leaves its list."""
    group = books.sequences[name].group
    books.running = [key for key in books.running if key != name]
    if not books.of_group(group):
        books.waiting = [key for key in books.waiting if key != group]
        books.swapped = [key for key in books.swapped if key != group]


def _hold(refs: dict[int, int], block_ids: list[int]) -> None:
    for block_id, times in Counter(block_ids).items():
        refs[block_id] = refs.get(block_id, 0) + times


def _pop(books: PaperBooks, block_ids: list[int]) -> None:
    """From the head of the queue, ref_cnt 0 -> 1."""
    assert books.free[: len(block_ids)] == block_ids
    del books.free[: len(block_ids)]
    assert not any(block_id in books.refs for block_id in block_ids)
    _hold(books.refs, block_ids)


def _let_go(refs: dict[int, int], block_ids: list[int]) -> list[int]:
    """One reference less per entry; the blocks that have none left, in the order in which they lost it."""
    gone: list[int] = []
    for block_id in block_ids:
        refs[block_id] -= 1
        if not refs[block_id]:
            del refs[block_id]
            gone.append(block_id)
    return gone
