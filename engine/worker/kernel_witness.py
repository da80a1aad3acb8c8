"""From what the kernels tell (`kernels.Witness`) to what a trace keeps: requests by name, slots as runs, equal layers once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.trace.witness import LaunchWitness, MappingProgramWitness, MappingWitness, ProgramWitness, runs_of
from kernels import LaunchWitness as KernelLaunch
from kernels import MappingAccess, ProgramAccess
from kernels import MappingWitness as KernelMapping

PAD_SLOT_ID = -1


@dataclass(frozen=True)
class LayerLaunch:
    """One launch of a forward pass and where it belongs."""

    layer: int
    group_id: int
    sliding_window: int | None
    launch: KernelLaunch


def report(launches: Sequence[LayerLaunch], ends: Sequence[tuple[int, str]]) -> list[LaunchWitness] | None:
    """The launches as an event carries them, None when no kernel ran. `ends`: for each request, in order of the batch, the end of its tokens and its id."""
    found: list[tuple[LayerLaunch, LaunchWitness]] = []
    for entry in launches:
        if entry.launch.programs is None:
            continue
        same = next((witness for other, witness in found if _same(entry, other)), None)
        if same is not None:
            same.layers.append(entry.layer)
            continue
        witness = LaunchWitness(
            kernel=entry.launch.kernel,
            layers=[entry.layer],
            grid=entry.launch.grid,
            lanes=entry.launch.lanes,
            block_size=entry.launch.block_size,
            programs=_programs(entry.launch, ends),
            group_id=entry.group_id,
            sliding_window=entry.sliding_window if entry.launch.kernel == "paged_attention" else None,
        )
        found.append((entry, witness))
    return [witness for _, witness in found] or None


def report_mappings(mappings: Mapping[int, KernelMapping], ends: Sequence[tuple[int, str]]) -> list[MappingWitness]:
    """The same of the launches that mapped slots, by group; nothing of those by the torch reference."""
    return [
        MappingWitness(group_id, told.grid, told.lanes, told.block_size, told.num_places, [_mapping_program(access, ends) for access in told.programs])
        for group_id, told in mappings.items()
        if told.programs is not None
    ]


def _mapping_program(access: MappingAccess, ends: Sequence[tuple[int, str]]) -> MappingProgramWitness:
    return MappingProgramWitness(
        program=access.program,
        lane=access.lane,
        request_id=_owner(access.tokens, ends),
        tokens=runs_of(access.tokens),
        slots=[] if set(access.slots) <= {PAD_SLOT_ID} else list(access.slots),
        rows_read=list(dict.fromkeys(row for row, _ in access.entries_read)),
        columns_read=[column for _, column in access.entries_read],
        block_ids_read=list(access.block_ids),
    )


def _same(a: LayerLaunch, b: LayerLaunch) -> bool:
    """Whether two layers did the same."""
    return (a.group_id, a.sliding_window) == (b.group_id, b.sliding_window) and a.launch == b.launch


def _programs(launch: KernelLaunch, ends: Sequence[tuple[int, str]]) -> list[ProgramWitness]:
    programs: list[ProgramWitness] = []
    for access in launch.programs or ():
        request_id = _owner(access.tokens, ends)
        if programs and access.key_slots_written and _goes_on(programs[-1], access, request_id):
            last = programs[-1]
            last.tokens.extend(access.tokens)
            last.slots_written.extend(access.key_slots_written)
            continue
        programs.append(_program(access, request_id, launch.block_size))
    return programs


def _goes_on(last: ProgramWitness, access: ProgramAccess, request_id: str | None) -> bool:
    """Whether the lane wrote one token for the same request as the lane before it."""
    same = last.request_id == request_id and last.program == access.program and last.lane + len(last.tokens) == access.lane
    plain = len(access.tokens) == len(access.key_slots_written) == 1 and (access.key_slots_written == access.value_slots_written)
    return same and plain and last.value_slots_written is None and len(last.tokens) == len(last.slots_written)


def _program(access: ProgramAccess, request_id: str | None, block_size: int) -> ProgramWitness:
    keys, values = access.key_slots_read, access.value_slots_read
    runs, value_runs = runs_of(keys), None if values == keys else runs_of(values)
    return ProgramWitness(
        program=access.program,
        lane=access.lane,
        request_id=request_id,
        tokens=list(access.tokens),
        kv_heads=list(access.kv_heads),
        block_ids_read=list(dict.fromkeys(b for start, end in (*runs, *(value_runs or ())) for b in range(start // block_size, (end - 1) // block_size + 1))),
        slots_read=runs,
        slots_written=list(access.key_slots_written),
        value_slots_read=value_runs,
        value_slots_written=None if access.value_slots_written == access.key_slots_written else list(access.value_slots_written),
    )


def _owner(tokens: Sequence[int], ends: Sequence[tuple[int, str]]) -> str | None:
    """Whose tokens these are, None when they are of nobody or of several."""
    owners = {next((request_id for end, request_id in ends if token < end), None) for token in tokens}
    return owners.pop() if len(owners) == 1 else None
