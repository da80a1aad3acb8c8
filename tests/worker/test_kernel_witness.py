"""What the worker reports of every kernel program, whole runs on the embedded model, and three mistakes that nothing else in a frame shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import engine.worker.batch_runner as batch_runner
from engine.core.output import SamplingParams
from engine.models import load_model
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper_session import PaperSession
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.codec import decode_json, encode_json
from engine.trace.events import AttentionComputed, BlocksCopied, BlocksSwappedIn, CauseKind, Event, PrefixLookup, RequestPreempted
from engine.trace.frame import Frame
from engine.trace.integrity import IntegrityError
from engine.trace.witness import LaunchWitness, runs_of, slots_in
from engine.trace.witness_check import COPIES_PAIRS, ONE_REQUEST, READS_OWN, WRITES_MAPPED
from engine.worker.block_table import BlockTable
from engine.worker.kv_cache import KVCache
from engine.worker.model_runner import ModelRunner
from tests.worker.harness import INTERPRET, ONE_LAYER, TORCH, VOCAB_SIZE, Driver, make_runner, random_prompt

PASSAGES = (
    "Four score and seven years ago our fathers brought forth on this continent",
    "Four score and seven years ago our fathers brought forth a new nation",
    "It was the best of times, it was the worst of times",
    "Call me Ishmael.",
)


def prompts() -> list[tuple[int, ...]]:
    encode = load_model("tiny").tokenizer.encode
    return [tuple(encode(text)) for text in PASSAGES]


def v1(**settings: Any) -> Session:
    """Four requests, one every other step: chunks beside decodes, and the second begins like the first."""
    specs = [RequestSpec(n, p, SamplingParams(max_tokens=8), arrival_step=1 + 2 * i) for i, (n, p) in enumerate(zip("ABCD", prompts(), strict=True))]
    config = SessionConfig(**{"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 10, "kernel_witness": True, **settings})
    return Session(config, tuple(specs), vocabulary=str, model_name="tiny", interpreted_layers=(0,))


def witnessed(frames: list[Frame]) -> Iterator[tuple[Frame, AttentionComputed]]:
    for frame in frames:
        if isinstance(frame.event, AttentionComputed):
            yield frame, frame.event


def attention_and_write(event: AttentionComputed) -> tuple[LaunchWitness, LaunchWitness]:
    assert event.witness is not None
    write, attention = event.witness
    assert (write.kernel, attention.kernel) == ("reshape_and_cache", "paged_attention")
    return attention, write


def expect_tables(frames: list[Frame], block_size: int) -> None:
    """Each request's blocks as often as there are KV heads, and a slot for each token, by R8.4 from the tables of the frame."""
    for frame, event in witnessed(frames):
        attention, write = attention_and_write(event)
        for request_id, query_len, seq_len in zip(event.request_ids, event.query_lens, event.seq_lens, strict=True):
            request = frame.request(request_id)
            assert request is not None
            (table,) = request.block_ids
            slots = [table[position // block_size] * block_size + position % block_size for position in range(seq_len)]
            programs = [p for p in attention.programs if p.request_id == request_id]
            assert [(p.kv_heads, p.block_ids_read, [*slots_in(p.slots_read)], p.value_slots_read) for p in programs] == [
                ([head], list(table[: -(-seq_len // block_size)]), slots, None) for head in range(2)
            ]
            written = [s for p in write.programs if p.request_id == request_id for s in p.slots_written]
            assert written == slots[seq_len - query_len :]
        assert sum(len(p.slots_written) for p in write.programs) == len(frame.slot_mapping)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_v1_chunks_decodes_and_prefix_hits(block_size: int) -> None:
    session = v1(block_size=block_size, num_blocks=240 // block_size)
    frames = session.run_to_end().frames
    assert session.error is None
    expect_tables(frames, block_size)
    batches = [event.query_lens for _, event in witnessed(frames)]
    assert any(len(lens) > 1 and max(lens) > 1 and min(lens) == 1 for lens in batches), "prefill and decode in one launch"
    if block_size < 16:
        assert any(isinstance(f.event, PrefixLookup) and f.event.num_hit_tokens for f in frames)


def test_v1_preemption() -> None:
    """Blocks go from one request to another and back; whoever reads them at a moment is their owner at that moment."""
    session = v1(num_blocks=14)
    frames = session.run_to_end().frames
    assert session.error is None
    assert any(isinstance(frame.event, RequestPreempted) for frame in frames)
    expect_tables(frames, 4)


def test_the_paper_shares_copies_and_swaps() -> None:
    """Sequences that share blocks (section 4.4) read the same blocks, each by programs of its own; after a swap (section 4.5) they read others."""
    prompt = prompts()
    config = PaperConfig(num_blocks=13, block_size=4, num_cpu_blocks=16, kernel_witness=True)
    specs = (
        PaperRequestSpec("A", prompt[0][:9], n=3, max_tokens=12, temperature=1.0),
        PaperRequestSpec("B", prompt[2][:7], n=2, max_tokens=12, temperature=1.0, seed=7),
    )
    session = PaperSession(config, specs, vocabulary=str, model_name="tiny", interpreted_layers=(0,))
    frames = session.run_to_end().frames
    assert session.error is None
    expect_tables(frames, 4)
    assert any(isinstance(frame.event, BlocksSwappedIn) for frame in frames)
    shared = [{p.block_ids_read[0] for p in attention_and_write(e)[0].programs if (p.request_id or "").startswith("A")} for _, e in witnessed(frames)]
    assert any(len(blocks) == 1 for blocks in shared)


@pytest.mark.parametrize(("layers", "told"), [((0,), [0]), ("all", [0, 1, 2, 3])])
def test_copies_of_shared_blocks(layers: Any, told: list[int]) -> None:
    """Section 4.4: before a shared block is written it is copied, in the interpreted layers by a kernel that reads it whole and writes the new one whole."""
    config = PaperConfig(num_blocks=40, block_size=4)
    spec = PaperRequestSpec("A", prompts()[0][:6], n=3, max_tokens=3, temperature=1.0)
    session = PaperSession(config, (spec,), vocabulary=str, model_name="tiny", interpreted_layers=layers)
    copies = [frame.event for frame in session.run_to_end().frames if isinstance(frame.event, BlocksCopied)]
    assert session.error is None
    assert copies
    for event in copies:
        assert event.witness is not None
        (launch,) = event.witness
        assert (launch.kernel, launch.layers) == ("copy_blocks", told)
        pairs = [(p.block_ids_read, [*slots_in(p.slots_read)], p.slots_written) for p in launch.programs]
        assert pairs == [
            ([source], [*range(4 * source, 4 * source + 4)], [*range(4 * destination, 4 * destination + 4)])
            for source, destination in zip(event.source_block_ids, event.destination_block_ids, strict=True)
        ]


def test_memory_that_groups_share_is_copied_once(model: PreTrainedModel) -> None:
    """R6.7: layers 0 and 1 lie in one memory. Copied for both, the second time 3 would get what 2 has got by then."""
    events: list[Event] = []
    runner = ModelRunner(
        model, num_blocks=6, block_sizes=(4, 4), max_num_seqs=2, max_model_len=16, max_num_batched_tokens=16, kernel_settings=INTERPRET, emit=events.append,
        layer_groups=[0, 1, 0], kernel_witness=True,
    )  # fmt: skip
    for cache in runner.kv_cache.key_caches:
        cache[1:4] = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    runner._copy_pages([(1, 2), (2, 3)], runner._layer_backends, CauseKind.COPY_QUEUED)
    assert [cache[:4, 0, 0, 0].tolist() for cache in runner.kv_cache.key_caches] == [[0, 1, 1, 2]] * 3
    (event,) = events
    assert isinstance(event, BlocksCopied)
    assert event.witness is not None
    assert [launch.layers for launch in event.witness] == [[0, 2]]


def test_copies_that_go_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and the event are right, the kernel is given another source."""
    copy_blocks = KVCache.copy_blocks
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs, *rest: copy_blocks(self, [((s + 1) % 40, d) for s, d in pairs], *rest))
    spec = PaperRequestSpec("A", prompts()[0][:6], n=3, max_tokens=3, temperature=1.0)
    session = PaperSession(PaperConfig(num_blocks=40, block_size=4), (spec,), vocabulary=str, model_name="tiny", interpreted_layers=(0,))
    session.run_to_end()
    assert isinstance(session.error, IntegrityError)
    assert {v.invariant for v in session.error.violations} == {COPIES_PAIRS}


@pytest.mark.parametrize(("num_blocks", "setting", "seen"), [(256, None, True), (257, None, False), (257, True, True), (256, False, False)])
def test_small_pools_are_watched_unless_the_settings_say_otherwise(num_blocks: int, setting: bool | None, seen: bool) -> None:
    session = v1(num_blocks=num_blocks, kernel_witness=setting)
    frame = session.run_until(lambda frame: isinstance(frame.event, AttentionComputed))
    assert frame is not None
    assert (frame.event.witness is not None) == seen  # type: ignore[union-attr]


def test_a_window_hides_the_blocks_before_it() -> None:
    """A window of 6 and blocks of 4: from position 9 on block 0 is not read any more, and the frames' tables still have it."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=6, initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    events: list[Event] = []
    driver = Driver(make_runner(MistralForCausalLM(config).eval(), emit=events.append, kernel_settings=INTERPRET, kernel_witness=True))
    driver.add("A", random_prompt(8, seed=0))
    driver.add("B", random_prompt(13, seed=1))
    driver.step({"A": 8, "B": 5})
    for step in range(4):
        driver.step({"A": 1, "B": 2})
        event = events[-1]
        assert isinstance(event, AttentionComputed)
        attention, _ = attention_and_write(event)
        assert (attention.layers, attention.sliding_window) == ([0, 1], 6)
        position = 8 + step
        table = driver.requests["A"].block_ids
        read = [p.block_ids_read for p in attention.programs if p.request_id == "A"]
        assert read == [table[max(position - 5, 0) // 4 : position // 4 + 1]] * 2
        first = 5 + 2 * step  # of the two queries of B the first sees back to its own window
        slots = [driver.requests["B"].block_ids[p // 4] * 4 + p % 4 for p in range(max(first - 5, 0), first + 2)]
        assert [p.slots_read for p in attention.programs if p.request_id == "B"] == [runs_of(slots)] * 2


def test_layers_that_do_the_same_are_told_once(model: PreTrainedModel) -> None:
    for settings, layers in ((ONE_LAYER, [1]), (INTERPRET, [0, 1, 2])):
        events: list[Event] = []
        driver = Driver(make_runner(model, emit=events.append, kernel_settings=settings, kernel_witness=True))
        driver.add("A", random_prompt(6, seed=0))
        driver.step({"A": 6})
        event = events[-1]
        assert isinstance(event, AttentionComputed)
        assert [launch.layers for launch in attention_and_write(event)] == [layers, layers]


@pytest.mark.parametrize(("settings", "asked"), [(TORCH, True), (INTERPRET, False)], ids=["the reference is no kernel", "nobody asked"])
def test_no_witness(model: PreTrainedModel, settings: Any, asked: bool) -> None:
    events: list[Event] = []
    driver = Driver(make_runner(model, emit=events.append, kernel_settings=settings, kernel_witness=asked))
    driver.add("A", random_prompt(6, seed=0))
    driver.step({"A": 6})
    assert isinstance(events[-1], AttentionComputed)
    assert events[-1].witness is None


def test_logits_are_the_same_with_and_without(model: PreTrainedModel) -> None:
    logits = []
    for asked in (True, False):
        driver = Driver(make_runner(model, emit=lambda event: None, kernel_settings=INTERPRET, kernel_witness=asked))
        driver.add("A", random_prompt(6, seed=0))
        driver.step({"A": 6})
        logits.append(driver.logits["A", 5])
    assert torch.equal(*logits)


def test_traces_keep_it() -> None:
    trace = v1().run_to_end()
    assert decode_json(encode_json(trace)).frames == trace.frames
    assert encode_json(v1().run_to_end()) == encode_json(trace)


# ------------------------------------------------------------------ mistakes


def broken(session: Session) -> IntegrityError:
    session.run_to_end()
    assert isinstance(session.error, IntegrityError), session.error
    return session.error


def test_a_stale_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8.3: the kernels walk the worker's row. Its first entry is another request's block, while manager's table, slots and written tokens are all right."""
    commit = BlockTable.commit_block_table

    def stale(self: BlockTable, num_reqs: int) -> None:
        commit(self, num_reqs)
        if num_reqs > 1 and self.num_blocks_per_row[1] > 4:  # its prompt is written, so that the slot mapping does not go by this entry any more
            self.block_table[1, 0] = self.block_table[0, 1]

    monkeypatch.setattr(BlockTable, "commit_block_table", stale)
    session = v1(enable_prefix_caching=False, max_num_batched_tokens=64)
    error = broken(session)
    event = session.trace.frames[-2].event
    assert isinstance(event, AttentionComputed)
    first = next(v for v in error.violations if v.invariant == READS_OWN)
    tables = {r.request_id: r.block_ids[0] for r in session.trace.frames[-2].requests}
    reader, owner = event.request_ids[1], event.request_ids[0]
    assert first.block_id == tables[owner][1]
    assert first.block_id not in tables[reader]
    assert f"program 0, lane 2 of paged_attention in layer 0 read keys of block {first.block_id} for {reader}" in str(error)


def test_a_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot mapping is reported as it should be, but the kernel is given another: the last token goes to the slot before."""
    report_slots = batch_runner.BatchRunner._report_slots

    def misplace(self: batch_runner.BatchRunner, parts: Any, slots: list[list[int]]) -> None:
        report_slots(self, parts, slots)
        self.block_table[0].slot_mapping[len(slots[0]) - 1] -= 1

    monkeypatch.setattr(batch_runner.BatchRunner, "_report_slots", misplace)
    session = v1()
    error = broken(session)
    due = session.trace.frames[-2].slot_mapping[-1]
    assert error.violations[0].invariant == WRITES_MAPPED
    assert f"wrote slot {due - 1} of block {(due - 1) // 4} for A, but the slot mapping names slot {due}" in str(error)


def test_a_wrong_slot_mapping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody believes the wrong mapping, the written token included, and the block is the request's own: only the table tells."""
    compute = BlockTable.compute_slot_mapping

    def swapped(self: BlockTable, num_reqs: int, query_start_loc: torch.Tensor, *rest: Any) -> None:
        compute(self, num_reqs, query_start_loc, *rest)
        self.slot_mapping[:2] = self.slot_mapping[:2].flip(0)

    monkeypatch.setattr(BlockTable, "compute_slot_mapping", swapped)
    session = v1()
    error = broken(session)
    assert {v.invariant for v in error.violations} == {WRITES_MAPPED}
    (table,) = session.trace.frames[-2].requests[0].block_ids
    assert f"wrote slot {4 * table[0] + 1} of block {table[0]} for position 0 of A, to which its block table gives slot {4 * table[0]}" in str(error)


def test_a_swapped_query_start_loc_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told that the first request has as many tokens as the second and the other way round."""
    make = batch_runner.AttentionMetadata

    def swapped(*, query_start_loc: torch.Tensor, **tensors: torch.Tensor) -> Any:
        lens = copy.copy(query_start_loc).diff()
        if len(lens) > 1:
            query_start_loc = torch.tensor([0, *lens.flip(0).cumsum(0).tolist()], dtype=torch.int32)
        return make(query_start_loc=query_start_loc, **tensors)

    monkeypatch.setattr(batch_runner, "AttentionMetadata", swapped)
    session = v1(max_num_batched_tokens=64)
    error = broken(session)
    assert error.violations[0].invariant == ONE_REQUEST
    assert "which are not those of one request (A and B) and read block" in str(error)
