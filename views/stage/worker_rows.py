"""The worker's rows beside the manager's tables: where they differ, who sat in a row before, and what a step was seen to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.trace.events import AttentionComputed, Event, RowUpdated, StateWritten, StepStarted
from engine.trace.frame import Frame, TraceHeader, WorkerRow
from views.narration.words import Words
from views.narration.worker_rows import RowNote, reads_note, row_notes, state_note


class RowsOnStage:
    """Follows the frames of a run in order. `before`: the frames that were sent already. `distinct`: every note once; frames name them by index."""

    def __init__(self, header: TraceHeader, before: Sequence[Frame]) -> None:
        self._header = header
        self._is_v1 = header.config.get("engine") != "paper"
        self.distinct: list[list[Any]] = []
        self._index: dict[tuple[Any, ...], int] = {}
        self._occupants: dict[int, list[str]] = {}
        self._reads: dict[tuple[str, int], tuple[list[int], list[int] | None, str]] = {}
        """Request and group -> blocks that this step read, the layers where a kernel said so (None: a state), and the sentence about a state."""
        self._last_notes: list[int] = []
        self._last_reads: list[int] = []
        self._news = False
        """Whether something was read since the last frame."""
        if self._is_v1:
            self._catch_up(before)

    def _catch_up(self, before: Sequence[Frame]) -> None:
        """Who sat where needs all frames, and only where rows are not cleared; what was read needs those of the step that is under way."""
        begin = len(before)
        while begin > 0 and not isinstance(before[begin - 1].event, StepStarted):
            begin -= 1
        if self._header.config.get("clear_rows") is False:
            for frame in before[:begin]:
                if isinstance(frame.event, RowUpdated):
                    self._follow(frame.event)
        for frame in before[begin:]:
            self._follow(frame.event)

    def at(self, frame: Frame, previous: Frame | None) -> dict[str, Any]:
        """`row_notes`: [request, group, first and last column, kind, sentence] of each difference. `row_reads`: [request, group, blocks, sentence] of what was
        read in this step so far. Both as indices into `distinct`."""
        if not self._is_v1:
            return {"row_notes": [], "row_reads": []}
        self._follow(frame.event)
        if not self._reads and all(_says_the_same(row, frame) for row in frame.rows):
            return {"row_notes": [], "row_reads": []}
        words = Words(self._header, frame, previous)
        notes = row_notes(words, self._occupants)
        numbers = [self._number(note) for note in notes]
        if numbers != self._last_notes or self._news:
            self._last_notes, self._news = numbers, False
            self._last_reads = [self._number(read) for read in self._read(words, notes)]
        return {"row_notes": numbers, "row_reads": self._last_reads}

    def _read(self, words: Words, notes: list[RowNote]) -> list[tuple[Any, ...]]:
        frame = words.frame
        return [
            (request_id, group_id, tuple(ids), said or reads_note(words, request_id, ids, layers or [], _differing(notes, frame, request_id, group_id)))
            for (request_id, group_id), (ids, layers, said) in self._reads.items()
        ]

    def _number(self, note: tuple[Any, ...]) -> int:
        index = self._index.get(note)
        if index is None:
            index = self._index[note] = len(self.distinct)
            self.distinct.append([list(part) if isinstance(part, tuple) else part for part in note])
        return index

    def _follow(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            self._reads, self._news = {}, True
        elif isinstance(event, RowUpdated) and event.request_id is not None:
            sat = self._occupants.setdefault(event.row, [])
            if not sat or sat[-1] != event.request_id:
                sat.append(event.request_id)
        elif isinstance(event, StateWritten) and event.request_id is not None and event.num_layers:
            read = [event.source_block_id] if event.source_block_id is not None else []
            self._news = True
            self._reads[event.request_id, event.group_id or 0] = (read, None, state_note(event.request_id, event.source_block_id, event.block_id))
        elif isinstance(event, AttentionComputed):
            self._watch(event)

    def _watch(self, event: AttentionComputed) -> None:
        """What the attention kernel told of itself, request by request."""
        self._news = True
        for launch in event.witness or ():
            if launch.kernel != "paged_attention":
                continue
            read: dict[str, dict[int, None]] = {}
            for program in launch.programs:
                if program.request_id is not None:
                    read.setdefault(program.request_id, {}).update(dict.fromkeys(program.block_ids_read))
            for request_id, block_ids in read.items():
                known = self._reads.get((request_id, launch.group_id))
                layers = [*(known[1] or [] if known else []), *launch.layers]
                self._reads[request_id, launch.group_id] = ([*dict.fromkeys([*(known[0] if known else []), *block_ids])], layers, "")


def _says_the_same(row: WorkerRow, frame: Frame) -> bool:
    request = frame.request(row.request_id)
    return not row.stale_block_ids and request is not None and request.block_ids == row.block_ids


def _differing(notes: list[RowNote], frame: Frame, request_id: str, group_id: int) -> list[int]:
    """The blocks that the row names where the table says something else, or behind its end."""
    row = next((row for row in frame.rows if row.request_id == request_id), None)
    if row is None:
        return []
    said = [*row.block_ids[group_id], *(row.stale_block_ids[group_id] if row.stale_block_ids else ())]
    mine = [note for note in notes if (note.request_id, note.group_id) == (request_id, group_id)]
    return [said[column] for note in mine for column in range(note.first, note.last + 1) if column < len(said) and said[column]]
