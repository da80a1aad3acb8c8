"""The event-driven simulation against the one that looks at every slot in every iteration: all sums, batch sizes and snapshots are the same numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.paper.memory_integrals import SlotTimes
from engine.paper.memory_simulation import SimulationResult, simulate
from engine.paper.reservation import SYSTEMS, System
from engine.paper.workload import Workload, WorkloadRequest
from tests.unit.paper_memory.naive_simulation import PARTS, NaiveResult, NaiveSimulation

REQUESTS = st.lists(
    st.tuples(st.one_of(st.just(0.0), st.floats(0, 40)), st.integers(1, 14), st.one_of(st.integers(1, 5), st.integers(1, 18))),
    min_size=1,
    max_size=14,
)


def plain(times: SlotTimes) -> dict[str, int]:
    return {part: getattr(times, part) for part in (*PARTS, "batch")}


def check(result: SimulationResult, naive: NaiveResult) -> None:
    assert plain(result.times) == {part: naive.all[part] for part in (*PARTS, "batch")}
    assert plain(result.times_while_waiting) == {part: naive.while_waiting[part] for part in (*PARTS, "batch")}
    assert (result.num_iterations, result.times_while_waiting.iterations) == (naive.num_iterations, naive.num_iterations_waiting)
    assert result.batch_sizes[:-1] == naive.batch_sizes
    assert result.batch_sizes[-1] == (naive.end, 0)
    assert (result.num_preemptions, result.end) == (naive.num_preemptions, naive.end)
    snapshot = result.snapshot
    assert snapshot is not None
    slots: dict[str, list[tuple[int, str]]] = {}
    for chunk in sorted(snapshot.chunks, key=lambda c: (c.request_id, c.logical_index or 0)):
        labels = ["token_states"] * chunk.used + ["reservation"] * chunk.reserved + ["internal"] * chunk.internal + ["rounding"] * chunk.rounding
        slots.setdefault(chunk.request_id, []).extend(zip(range(chunk.start, chunk.start + chunk.size), labels, strict=True))
    assert slots == naive.slots_at.get(snapshot.iteration, {})
    taken = {slot for held in slots.values() for slot, _ in held}
    assert [slot for start, size in snapshot.gaps for slot in range(start, start + size)] == [s for s in range(snapshot.num_slots) if s not in taken]


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    system=st.sampled_from(SYSTEMS),
    num_slots=st.integers(32, 90),
    block_size=st.integers(1, 8),
    max_num_seqs=st.integers(1, 9),
    watermark=st.sampled_from([0.0, 0.2]),
    data=st.data(),
)
def test_equals_the_slot_by_slot_simulation(
    requests: list[tuple[float, int, int]], system: System, num_slots: int, block_size: int, max_num_seqs: int, watermark: float, data: st.DataObject
) -> None:
    workload = Workload("random", "test", tuple(WorkloadRequest(*numbers, f"R{i:02}") for i, numbers in enumerate(requests)))
    watermark_blocks = int(watermark * (num_slots // block_size))
    naive = NaiveSimulation(system, num_slots, block_size, 32, max_num_seqs, watermark_blocks).run(list(workload.requests))
    snapshot_at = data.draw(st.integers(0, naive.end - 1))
    result = simulate(
        workload,
        system,
        num_slots=num_slots,
        block_size=block_size,
        max_model_len=32,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        snapshot_at=snapshot_at,
    )
    assert not result.refused
    check(result, naive)


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, num_slots=st.integers(32, 60))
def test_pressure_on_pages(requests: list[tuple[float, int, int]], num_slots: int) -> None:
    """Everybody at once into a small pool, block size 4: many preemptions. At every moment a running request wastes less than one block (section 4.3)."""
    workload = Workload("random", "test", tuple(WorkloadRequest(0.0, p, o, f"R{i:02}") for i, (_, p, o) in enumerate(requests * 2)))
    naive = NaiveSimulation("paged", num_slots, 4, 32, 256, 0).run(list(workload.requests))
    check(simulate(workload, "paged", num_slots=num_slots, block_size=4, max_model_len=32, watermark=0.0), naive)
    for held in naive.slots_at.values():
        for slots in held.values():
            assert sum(label != "token_states" for _, label in slots) < 4
