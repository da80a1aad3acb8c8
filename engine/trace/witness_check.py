"""What the kernel's programs were seen to do against what the frame's tables allow: the one check that trusts neither the worker nor its tables.

A witness says which tokens of the batch a program worked for. Whose they are, and which slots they may touch, follows from the event's request ids and
lengths and from the manager's block tables (R8.4: slot = block_number * block_size + offset).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.trace.batch_rows import BatchRow, rows_of
from engine.trace.events import AttentionComputed, BlocksCopied
from engine.trace.frame import Frame
from engine.trace.mapping_check import check_mapping
from engine.trace.violation import Violation
from engine.trace.witness import LaunchWitness, ProgramWitness, Run, slots_in

ONE_REQUEST = "a kernel program works for one request"
READS_OWN = "a kernel program reads only its own request's blocks"
READS_ALL = "a kernel program reads every key that its queries see, and no other"
WRITES_MAPPED = "a kernel program writes only the slots of the slot mapping"
WRITES_ALL = "the kernel writes every token of the batch once"
COPIES_PAIRS = "the kernel copies the queued blocks as whole pages, and no other"
ANSWERS_ALL = "the kernel computes every token of the batch in every KV head once"


def check_witness(frame: Frame) -> Iterator[Violation]:
    """Violations of the frame's kernel witness, none where its event has none. O(blocks read + slots written) for what is sound."""
    event = frame.event
    if isinstance(event, BlocksCopied):
        for launch in event.witness or ():
            yield from _check_copies(launch, event)
    if not isinstance(event, AttentionComputed):
        return
    for mapping in event.mapping_witness:
        yield from check_mapping(mapping, rows_of(event, frame, mapping.group_id))
    for launch in event.witness or ():
        rows = rows_of(event, frame, launch.group_id)
        if launch.kernel == "reshape_and_cache":
            slot_mapping = event.slot_mappings.get(launch.group_id) or frame.slot_mapping
            yield from _check_writes(launch, rows, slot_mapping)
        else:
            yield from _check_reads(launch, rows)


def _row_of(program: ProgramWitness, rows: Sequence[BatchRow]) -> BatchRow | None:
    """The part of the batch that all of the program's tokens lie in."""
    return next((row for row in rows if program.tokens and row.start <= min(program.tokens) and max(program.tokens) < row.end), None)


def _name(launch: LaunchWitness, program: ProgramWitness) -> str:
    layers = f"layer {launch.layers[0]}" if len(launch.layers) == 1 else f"layers {', '.join(map(str, launch.layers))}"
    lane = f", lane {program.lane}" if launch.lanes > 1 else ""
    return f"program {program.program}{lane} of {launch.kernel} in {layers}"


def _check_reads(launch: LaunchWitness, rows: Sequence[BatchRow]) -> Iterator[Violation]:
    answered: dict[int, list[int]] = {}
    for program in launch.programs:
        row = _row_of(program, rows)
        if row is None:
            yield _of_nobody(launch, program, rows)
            continue
        for token in program.tokens:
            answered.setdefault(token, []).extend(program.kv_heads)
        first, last = row.position_of(min(program.tokens)), row.position_of(max(program.tokens))
        oldest = 0 if launch.sliding_window is None else max(0, first - launch.sliding_window + 1)
        allowed = _runs_at(row.table, oldest, last + 1, launch.block_size)
        for what, runs in (("key", program.slots_read), ("value", program.value_slots_read)):
            if runs is not None and list(runs) != allowed:
                yield from _explain_reads(_name(launch, program), what, runs, allowed, row, launch.block_size)
    heads = sorted({head for program in launch.programs for head in program.kv_heads})
    for row in rows:
        wrong = [token for token in range(row.start, row.end) if sorted(answered.get(token, ())) != heads]
        if wrong:
            text = (
                f"{launch.kernel} in layers {', '.join(map(str, launch.layers))} computed position {row.position_of(wrong[0])} of {row.request_id} in the KV "
                f"heads {sorted(answered.get(wrong[0], ()))}, not once in each of {heads}"
            )
            yield Violation(ANSWERS_ALL, text)


def _of_nobody(launch: LaunchWitness, program: ProgramWitness, rows: Sequence[BatchRow]) -> Violation:
    whose = [row.request_id for row in rows if any(row.start <= token < row.end for token in program.tokens)]
    text = f"{_name(launch, program)} worked for the tokens {', '.join(map(str, program.tokens)) or 'of nobody'} of the batch"
    block = program.block_ids_read[0] if program.block_ids_read else None
    where = f" and read block {block}" if block is not None else ""
    return Violation(ONE_REQUEST, f"{text}, which are not those of one request ({' and '.join(whose) or 'none'}){where}", block)


def _runs_at(table: Sequence[int], start: int, end: int, block_size: int) -> list[Run]:
    """Slots of the positions start..end-1, as far as the table goes."""
    runs: list[Run] = []
    for index in range(start // block_size, min(-(-end // block_size), len(table))):
        first = table[index] * block_size + max(start - index * block_size, 0)
        last = table[index] * block_size + min(end - index * block_size, block_size)
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, last))
    return runs


def _explain_reads(name: str, what: str, runs: Sequence[Run], allowed: Sequence[Run], row: BatchRow, block_size: int) -> Iterator[Violation]:
    read, due = list(slots_in(runs)), list(slots_in(allowed))
    foreign = [slot for slot in read if slot // block_size not in row.table]
    for block_id in dict.fromkeys(slot // block_size for slot in foreign):
        text = f"{name} read {what}s of block {block_id} for {row.request_id}, whose block table is {list(row.table)}"
        yield Violation(READS_OWN, text, block_id)
    extra = [slot for slot in read if slot not in due and slot not in foreign]
    missing = [slot for slot in due if slot not in read]
    for problem, slots in (("read", extra), ("did not read", missing)):
        if slots:
            block_id, offset = divmod(slots[0], block_size)
            says = "which its queries do not see" if problem == "read" else "which its queries see"
            yield Violation(READS_ALL, f"{name} {problem} the {what} in slot {offset} of block {block_id} for {row.request_id}, {says}", block_id)
    if not foreign and not extra and not missing:
        text = f"{name} read the {what}s of {row.request_id} in the order {_blocks(read, block_size)}, but the block table has {_blocks(due, block_size)}"
        yield Violation(READS_ALL, text, read[0] // block_size)


def _blocks(slots: Sequence[int], block_size: int) -> list[int]:
    return list(dict.fromkeys(slot // block_size for slot in slots))


def _check_writes(launch: LaunchWitness, rows: Sequence[BatchRow], slot_mapping: Sequence[int]) -> Iterator[Violation]:
    written: list[int] = []
    for program in launch.programs:
        row = _row_of(program, rows)
        if row is None:
            yield _of_nobody(launch, program, rows)
            continue
        written += program.tokens
        for slots in (program.slots_written, program.value_slots_written):
            if slots is not None:
                yield from _check_slots(launch, program, slots, row, slot_mapping)
    due = [token for row in rows for token in range(row.start, row.end)]
    if sorted(written) != due:
        wrong = sorted(set(written).symmetric_difference(due)) or sorted({token for token in written if written.count(token) > 1})
        text = f"{launch.kernel} in layers {', '.join(map(str, launch.layers))} did not store the tokens {', '.join(map(str, wrong))} of the batch once each"
        yield Violation(WRITES_ALL, text)


def _check_slots(launch: LaunchWitness, program: ProgramWitness, slots: Sequence[int], row: BatchRow, slot_mapping: Sequence[int]) -> Iterator[Violation]:
    name = _name(launch, program)
    size = launch.block_size
    if len(slots) != len(program.tokens):
        yield Violation(WRITES_MAPPED, f"{name} wrote {len(slots)} slots for {len(program.tokens)} tokens of {row.request_id}")
        return
    for token, slot in zip(program.tokens, slots, strict=True):
        index, offset = divmod(row.position_of(token), size)
        block_id = slot // size
        if token < len(slot_mapping) and slot_mapping[token] != slot:
            of = f" of group {launch.group_id}" if launch.group_id else ""
            text = f"{name} wrote slot {slot} of block {block_id} for {row.request_id}, but the slot mapping{of} names slot {slot_mapping[token]}"
            yield Violation(WRITES_MAPPED, text, block_id)
        elif index >= len(row.table) or row.table[index] * size + offset != slot:
            due = f"slot {row.table[index] * size + offset}" if index < len(row.table) else "no slot"
            text = (
                f"{name} wrote slot {slot} of block {block_id} for position {index * size + offset} of {row.request_id}, to which its block table gives {due}"
            )
            yield Violation(WRITES_MAPPED, text, block_id)


def _check_copies(launch: LaunchWitness, event: BlocksCopied) -> Iterator[Violation]:
    """Each program serves one pair, and together they read all slots of the sources and write all slots of the destinations (R6.7)."""
    size = launch.block_size
    pairs = {*zip(event.source_block_ids, event.destination_block_ids, strict=True)}
    for program in launch.programs:
        read, written = _blocks(list(slots_in(program.slots_read)), size), _blocks(program.slots_written, size)
        if len(read) != 1 or len(written) != 1 or (read[0], written[0]) not in pairs:
            text = f"{_name(launch, program)} read the blocks {read} and wrote the blocks {written}; the queued copies are {_pairs(event)}"
            yield Violation(COPIES_PAIRS, text, next(iter(written), None))
    pages = [range(block_id * size, (block_id + 1) * size) for block_ids in (event.source_block_ids, event.destination_block_ids) for block_id in block_ids]
    due_read, due_written = ({slot for page in half for slot in page} for half in (pages[: len(pages) // 2], pages[len(pages) // 2 :]))
    for what in ("key", "value"):
        for verb, due in (("read", due_read), ("wrote", due_written)):
            done = {slot for program in launch.programs for slot in _copied(program, what, verb)}
            for problem, slots in ((verb, done - due), (f"never {verb}", due - done)):
                if slots:
                    block_id, offset = divmod(min(slots), size)
                    layers = ", ".join(map(str, launch.layers))
                    text = f"copy_blocks in layers {layers} {problem} the {what} in slot {offset} of block {block_id}; the queued copies are {_pairs(event)}"
                    yield Violation(COPIES_PAIRS, text, block_id)


def _copied(program: ProgramWitness, what: str, verb: str) -> list[int]:
    if verb == "read":
        return list(slots_in(program.slots_read if what == "key" or program.value_slots_read is None else program.value_slots_read))
    return program.slots_written if what == "key" or program.value_slots_written is None else program.value_slots_written


def _pairs(event: BlocksCopied) -> str:
    return ", ".join(f"{source} to {destination}" for source, destination in zip(event.source_block_ids, event.destination_block_ids, strict=True))
