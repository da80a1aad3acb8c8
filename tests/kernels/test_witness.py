"""What programs are seen to do, against the batch's tables: slots follow from R8.4, which keys a query sees from the paper, section 4.1."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

import kernels
from kernels import LaunchWitness, Witness
from kernels.interpreter import launch
from kernels.launch import Launcher
from kernels.metadata import Derived
from kernels.pointer_trace import WatchedTensor, watching

OWN_ACCOUNT = Launcher(run=launch, interpreted=True, own_account=True)
"""The kernels that write down what they do, as compiled ones must, run by the interpreter."""
BATCHES = {
    "one decode": ([1], [7]),
    "chunk after a cached prefix": ([5], [14]),
    "prefill and decode mixed": ([5, 1, 8, 1, 3], [5, 12, 21, 1, 4]),
    "a request without queries": ([2, 0, 1], [6, 5, 9]),
    "longer than one query block": ([70, 1], [75, 40]),
}


@pytest.fixture(params=["watched", "own account"])
def by(request) -> str:
    return request.param


def attend(batch, by: str, sliding_window: int | None = None) -> LaunchWitness:
    witness = Witness()
    if by == "watched":
        kernels.paged_attention(*batch.arguments, scale=0.3, sliding_window=sliding_window, witness=witness, backend="interpret")
    else:
        out = torch.zeros_like(batch.query)
        OWN_ACCOUNT.paged_attention(*batch.arguments, scale=0.3, sliding_window=sliding_window, out=out, derived=Derived(), witness=witness)
    (told,) = witness.launches
    return told


def owner(batch, token: int) -> tuple[int, int]:
    """Request and position of a token of the batch."""
    request = int(torch.searchsorted(batch.query_start_loc, token, right=True)) - 1
    return request, int(batch.seq_lens[request]) - (int(batch.query_start_loc[request + 1]) - token)


def slot(batch, request: int, position: int) -> int:
    block_size = batch.key_cache.shape[1]
    return int(batch.block_table[request, position // block_size]) * block_size + position % block_size


def check(batch, told: LaunchWitness, sliding_window: int | None = None) -> None:
    """Every token once per KV head, by lanes that each read exactly what their queries see, in logical order."""
    assert told.programs is not None
    num_tokens, num_kv_heads = int(batch.query_start_loc[-1]), batch.key_cache.shape[2]
    assert sorted((t, h) for p in told.programs for t in p.tokens for h in p.kv_heads) == [(t, h) for t in range(num_tokens) for h in range(num_kv_heads)]
    for program in told.programs:
        (request,) = {owner(batch, token)[0] for token in program.tokens}
        first, last = owner(batch, program.tokens[0])[1], owner(batch, program.tokens[-1])[1]
        oldest = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        assert program.key_slots_read == program.value_slots_read == tuple(slot(batch, request, p) for p in range(oldest, last + 1))
        assert program.key_slots_written == program.value_slots_written == ()
        assert program.program < told.grid
        assert program.lane < told.lanes


@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_reads_what_its_queries_see(batch_of, name, block_size, sliding_window, by):
    """Lanes without work and masked addresses count for nothing; blocks before the window are not read."""
    batch = batch_of(*BATCHES[name], block_size=block_size)
    check(batch, attend(batch, by, sliding_window), sliding_window)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (4, 4, 8), (6, 2, 24)])
def test_grouped_heads(batch_of, num_q_heads, num_kv_heads, head_dim, by):
    batch = batch_of([3, 1, 6], [10, 18, 6], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    check(batch, attend(batch, by))


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_many_programs_and_many_tiles(batch_of, monkeypatch, sliding_window, by):
    """As on a GPU: one lane per program, several tiles per lane, several query blocks per request."""
    monkeypatch.setattr("kernels.launch_attention.INTERPRETED_ELEMENTS", 1)
    monkeypatch.setattr("kernels.launch_attention.INTERPRETED_BLOCK_Q", 3)
    batch = batch_of([7, 1], [90, 130])
    told = attend(batch, by, sliding_window)
    check(batch, told, sliding_window)
    assert told.lanes == 1
    assert told.grid == len(told.programs) == 2 * (2 + 1)  # KV heads times query blocks of 4 and 3 queries, and of 1


def test_half_precision(batch_of, by):
    batch = batch_of([4, 1], [12, 30], head_dim=32, dtype=torch.bfloat16)
    check(batch, attend(batch, by))


def test_another_layout_of_the_caches(batch_of, by):
    """Heads outside the slots, and keys and values taking turns in one tensor: an address tells block, slot and head all the same."""
    batch = batch_of([3, 1], [9, 6])
    num_blocks, block_size, num_kv_heads, head_dim = batch.key_cache.shape
    both = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim)
    both[:, 0], both[:, 1] = batch.key_cache.transpose(1, 2), batch.value_cache.transpose(1, 2)
    batch.key_cache, batch.value_cache = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    check(batch, attend(batch, by))


def test_a_wrong_table_shows(batch_of, by):
    """The witness follows the pointers: what stands in the table by mistake is what was read."""
    batch = batch_of([1, 1], [7, 10])
    right = attend(batch, by)
    stale = int(batch.block_table[1, 0])
    batch.block_table[0, 0] = stale
    wrong = attend(batch, by)
    assert [p.key_slots_read[:4] for p in wrong.programs if p.tokens == (0,)] == [tuple(range(4 * stale, 4 * stale + 4))] * 2
    assert [p for p in wrong.programs if p.tokens == (1,)] == [p for p in right.programs if p.tokens == (1,)]


@triton.jit
def _off_by_one_kernel(key_ptr, value_ptr, row: tl.constexpr, tile: tl.constexpr):
    """Reads the values of the block behind the one whose keys it reads, and writes nothing that counts."""
    lane = tl.arange(0, 2)[:, None]
    place = (tl.program_id(0) * 2 + lane) * row + tl.arange(0, tile)[None, :]
    inside = tl.arange(0, tile)[None, :] < row
    tl.load(value_ptr + place + row, mask=inside)
    tl.store(key_ptr + place, tl.load(key_ptr + place, mask=inside), mask=inside & (lane < 0))


def test_keys_and_values_are_told_apart():
    keys, values = torch.zeros(6, 3, 1, 2), torch.zeros(6, 3, 1, 2)
    watched = [WatchedTensor(cache, (0, 1, 2), exact=2) for cache in (keys, values)]
    with watching(watched):
        launch(_off_by_one_kernel, (2,), keys, values, row=6, tile=8)
    seen = [[(t.program, lane, block) for t in tensor.reads for lane, block in zip(t.lanes, t.indices[0], strict=True)] for tensor in watched]
    assert set(seen[0]) == {(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)}
    assert set(seen[1]) == {(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)}
    assert watched[0].writes == []  # every lane of the store was masked


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_writes(by, num_kv_heads):
    """R8.5: a padded token (-1) is not written; every other by one lane, key and value alike."""
    slots = torch.tensor([9, -1, 3, 30, 4])
    key, value = torch.randn(5, num_kv_heads, 8), torch.randn(5, num_kv_heads, 8)
    keys, values = torch.zeros(8, 4, num_kv_heads, 8), torch.zeros(8, 4, num_kv_heads, 8)
    witness = Witness()
    if by == "watched":
        kernels.reshape_and_cache(key, value, keys, values, slots, witness=witness, backend="interpret")
    else:
        OWN_ACCOUNT.reshape_and_cache(key, value, keys, values, slots, Derived(), witness)
    (told,) = witness.launches
    assert [(p.tokens, p.key_slots_written, p.value_slots_written) for p in told.programs] == [((t,), (s,), (s,)) for t, s in [(0, 9), (2, 3), (3, 30), (4, 4)]]
    assert all(p.kv_heads == tuple(range(num_kv_heads)) and p.key_slots_read == () for p in told.programs)
    assert torch.equal(keys.flatten(0, 1)[slots[slots >= 0]], key[slots >= 0])


@pytest.mark.parametrize("elements", [1 << 20, 1])
def test_copies(monkeypatch, elements, by):
    """R6.7: each pair by one lane (or one program per tile), every slot of the source read, every slot of the destination written, in each layer."""
    monkeypatch.setattr("kernels.launch.INTERPRETED_ELEMENTS", elements)
    keys, values = [torch.randn(6, 2, 1, 4) for _ in range(2)], [torch.randn(6, 2, 1, 4) for _ in range(2)]
    witness, pairs = Witness(), torch.tensor([[1, 2], [2, 5]])
    before = keys[0].clone()
    if by == "watched":
        kernels.copy_blocks(keys, values, pairs, witness=witness, backend="interpret")
    else:
        OWN_ACCOUNT.copy_blocks(keys, values, pairs, witness)
    assert torch.equal(keys[0][5], before[2])
    assert [told.kernel for told in witness.launches] == ["copy_blocks"] * 2
    for told in witness.launches:
        assert {s for p in told.programs for s in p.key_slots_read} == {s for p in told.programs for s in p.value_slots_read} == {2, 3, 4, 5}
        assert {s for p in told.programs for s in p.key_slots_written} == {s for p in told.programs for s in p.value_slots_written} == {4, 5, 10, 11}
        if elements > 1:
            assert [(p.lane, p.key_slots_read, p.key_slots_written) for p in told.programs] == [(0, (2, 3), (4, 5)), (1, (4, 5), (10, 11))]


def test_the_reference_has_no_programs(batch_of):
    witness = Witness()
    kernels.paged_attention(*batch_of([1], [7]).arguments, scale=0.3, witness=witness, backend="torch")
    cache = torch.zeros(4, 4, 1, 8)
    kernels.copy_blocks([cache] * 2, [cache.clone()] * 2, torch.tensor([[1, 2]]), witness=witness, backend="torch")
    assert witness.launches == [LaunchWitness("paged_attention", 4, None), *[LaunchWitness("copy_blocks", 4, None)] * 2]


def test_nobody_watches_afterwards_or_without_being_asked(batch_of, monkeypatch):
    batch = batch_of([3, 1], [7, 10])
    attend(batch, "watched")
    builder = triton_interpreter.interpreter_builder
    assert not {"create_masked_load", "create_masked_store"} & vars(builder).keys()
    monkeypatch.setattr("kernels.pointer_trace.WatchedTensor.note", lambda *_: pytest.fail("nobody asked"))
    kernels.paged_attention(*batch.arguments, scale=0.3, backend="interpret")
    batch.block_table[0, 0] = 2**30
    monkeypatch.setattr("kernels.interpreter._interpreted", lambda _: (_ for _ in ()).throw(RuntimeError("stopped")))
    with pytest.raises(RuntimeError, match="stopped"):
        attend(batch, "watched")
    assert not {"create_masked_load", "create_masked_store"} & vars(builder).keys()
