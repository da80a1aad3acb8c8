"""What the programs of the slot mapping were seen to do, against R8.4 worked out from the manager's tables: slot = block_number * block_size + offset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.trace.batch_rows import BatchRow
from engine.trace.violation import Violation
from engine.trace.witness import MappingProgramWitness, MappingWitness, slots_in

MAPS_ONE = "a slot mapping program serves one request"
LOOKS_UP_OWN = "the slot mapping looks up only its request's row, as the block table has it"
MAPS_POSITIONS = "the slot mapping gives every token the slot of its position"
MAPS_ALL = "the slot mapping serves every token of the batch once"
PADS_REST = "the slot mapping gives no slot to the places behind the batch"
PAD_SLOT_ID = -1


def check_mapping(launch: MappingWitness, rows: Sequence[BatchRow]) -> Iterator[Violation]:
    """`rows`: the batch's requests in order, with the manager's tables of the launch's group. O(tokens + places behind the batch)."""
    num_tokens = rows[-1].end if rows else 0
    served: Counter[int] = Counter()
    for program in launch.programs:
        tokens = [*slots_in(program.tokens)]
        slots = program.slots or [PAD_SLOT_ID] * len(tokens)
        served.update(tokens)
        index = next((i for i, row in enumerate(rows) if tokens and row.start <= min(tokens) and max(tokens) < row.end), None)
        if index is not None:
            yield from _check_request(launch, program, tokens, slots, index, rows[index])
        elif any(token < num_tokens for token in tokens):
            whose = [row.request_id for row in rows if any(row.start <= token < row.end for token in tokens)]
            text = f"{_name(launch, program)} stored the slots of {' and '.join(whose)}{' and of places behind the batch' * (max(tokens) >= num_tokens)}"
            yield Violation(MAPS_ONE, text)
        else:
            wrong = next(((token, slot) for token, slot in zip(tokens, slots, strict=True) if slot != PAD_SLOT_ID), None)
            if wrong is not None:
                text = f"{_name(launch, program)} stored slot {wrong[1]} at place {wrong[0]}, where the batch of {num_tokens} tokens has ended"
                yield Violation(PADS_REST, text, wrong[1] // launch.block_size)
    wrong_tokens = [token for token in range(num_tokens) if served[token] != 1]
    if wrong_tokens:
        text = f"the slot mapping of group {launch.group_id} stored a slot for token {wrong_tokens[0]} of the batch {served[wrong_tokens[0]]} times"
        yield Violation(MAPS_ALL, text)
    left = [place for place in range(num_tokens, launch.num_places) if place not in served]
    if left:
        yield Violation(PADS_REST, f"the slot mapping of group {launch.group_id} stored nothing at place {left[0]}, behind the batch of {num_tokens} tokens")


def _check_request(
    launch: MappingWitness, program: MappingProgramWitness, tokens: Sequence[int], slots: Sequence[int], index: int, row: BatchRow
) -> Iterator[Violation]:
    name, size = _name(launch, program), launch.block_size
    if any(read != index for read in program.rows_read):
        yield Violation(LOOKS_UP_OWN, f"{name} looked up the rows {program.rows_read} of the block table for {row.request_id}, which sits in row {index}")
    else:
        for column, block_id in zip(program.columns_read, program.block_ids_read, strict=True):
            if column >= len(row.table) or row.table[column] != block_id:
                due = f"block {row.table[column]}" if column < len(row.table) else "nothing"
                text = f"{name} found block {block_id} in column {column} of row {index} for {row.request_id}, where its block table has {due}"
                yield Violation(LOOKS_UP_OWN, text, block_id)
                break
    due_columns = [*dict.fromkeys(row.position_of(token) // size for token in tokens)]
    if program.columns_read != due_columns:
        text = f"{name} looked up the columns {program.columns_read} for {row.request_id}, whose tokens lie in the columns {due_columns}"
        yield Violation(MAPS_POSITIONS, text)
    for token, slot in zip(tokens, slots, strict=True):
        column, offset = divmod(row.position_of(token), size)
        due_slot = row.table[column] * size + offset if column < len(row.table) else PAD_SLOT_ID
        if slot != due_slot:
            text = f"{name} gave position {column * size + offset} of {row.request_id} the slot {slot}, to which its block table gives slot {due_slot}"
            yield Violation(MAPS_POSITIONS, text, max(slot // size, 0))
            return


def _name(launch: MappingWitness, program: MappingProgramWitness) -> str:
    lane = f", lane {program.lane}" if launch.lanes > 1 else ""
    return f"program {program.program}{lane} of the slot mapping of group {launch.group_id}"
