"""A close-up of a step's kernels against what it must be: block-table arithmetic (R8.4), online softmax in float64, the trace of the run, hand counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from engine.core.output import SamplingParams
from engine.models import load_model
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace.closeup import KernelCloseup, LaneCloseup, LaunchCloseup
from engine.trace.codec import encode_json
from engine.trace.events import AttentionComputed, SlotsMapped
from engine.trace.slot_arithmetic import slot_arithmetic
from engine.trace.witness import slots_in
from engine.worker import attention
from engine.worker.closeup import kernel_closeup
from engine.worker.closeup_part import shown_part
from engine.worker.layer_capture import LayerCapture, LayerInputs
from kernels import paged_attention

NOTHING_SEEN = -1e38
BLOCK_SIZE = 4
TEXTS = (
    "Four score and seven years ago our fathers brought forth on this continent",
    "It was the best of times, it was the worst of times",
    "Call me Ishmael.",
)


def session(model: str = "tiny", **settings: Any) -> Session:
    """Three requests, one every other step: chunks of prefill beside decodes."""
    encode = load_model("tiny").tokenizer.encode
    specs = tuple(
        RequestSpec(name, tuple(encode(text)), SamplingParams(max_tokens=6), arrival_step=1 + 2 * place)
        for place, (name, text) in enumerate(zip("ABC", TEXTS, strict=True))
    )
    config = SessionConfig(**{"num_blocks": 60, "block_size": BLOCK_SIZE, "max_num_batched_tokens": 10, **settings})
    return Session(config, specs, vocabulary=str, model_name=model, interpreted_layers=(0,))


def computed(run: Session, step: int) -> int:
    """Frame of the step's attention."""
    frame = run.run_until(lambda frame: frame.step == step and isinstance(frame.event, AttentionComputed))
    assert frame is not None
    return frame.seq


def attention_of(launches: list[LaunchCloseup]) -> LaunchCloseup:
    return next(launch for launch in launches if launch.kernel == "paged_attention_kernel")


def inputs_of(run: Session, step: int, layer: int) -> LayerInputs:
    """What the layer is given in the step, captured here a second time."""
    again = run.fresh()
    capture = LayerCapture(layer)
    again.capture_layer(capture)
    again.run_until(lambda frame: frame.step == step and isinstance(frame.event, AttentionComputed))
    assert capture.inputs is not None
    return capture.inputs


def keys_and_values(inputs: LayerInputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per request, float64 [seq_len, num_kv_heads, head_dim] of keys and of values: those of the pages, and this step's behind them."""
    found = []
    starts, size = inputs.query_start_loc.tolist(), inputs.key_cache.shape[1]
    for row, seq_len in enumerate(inputs.seq_lens.tolist()):
        computed_before = seq_len - (starts[row + 1] - starts[row])
        pages = inputs.block_table[row, : -(-seq_len // size)].long()
        both = [
            torch.cat([cache[pages].flatten(0, 1)[:computed_before], fresh[starts[row] : starts[row + 1]]]).double()
            for cache, fresh in ((inputs.key_cache, inputs.key), (inputs.value_cache, inputs.value))
        ]
        found.append((both[0], both[1]))
    return found


CASES = [("tiny", 5, 0, 4), ("tiny", 5, 2, 16), ("tiny", 1, 0, None), ("tiny-swa", 4, 1, 4), ("tiny-swa", 6, 0, 2), ("tiny-swa", 5, 2, 4)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-step{case[1]}-layer{case[2]}-tile{case[3]}")
def case(request: pytest.FixtureRequest) -> tuple[KernelCloseup, LayerInputs, int | None, Session]:
    model, step, layer, tile = request.param
    run = session(model)
    return kernel_closeup(run, computed(run, step), layer, tile), inputs_of(run, step, layer), tile, run


def test_every_query_head_of_every_token_has_one_lane(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    closeup, inputs, _, _ = case
    wanted = list(itertools.product(range(inputs.query.shape[0]), range(closeup.num_q_heads)))
    for launches in (closeup.gpu, closeup.interpreted):
        lanes = attention_of(launches).attention
        assert len(lanes) == math.prod(attention_of(launches).grid) * attention_of(launches).lanes
        if len(attention_of(launches).grid) == 1:
            assert sorted((row.token, row.q_head) for lane in lanes for row in lane.rows) == wanted
        assert all(row.q_head // (closeup.num_q_heads // closeup.num_kv_heads) == lane.kv_head for lane in lanes for row in lane.rows)
        assert all(not lane.tiles and lane.request_id is None for lane in lanes if not lane.tokens)
    assert all(launch.lanes == 1 for launch in closeup.gpu)


def test_r8_4_lanes_walk_their_rows_up_to_their_last_query(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    """Which slot belongs to a position is arithmetic; which positions a lane needs follows from causality and window."""
    closeup, _, tile, _ = case
    size = attention_of(closeup.gpu).constants["TILE"]
    assert tile is None or size == tile
    for launches in (closeup.gpu, closeup.interpreted):
        for key, lanes in itertools.groupby(sorted((lane for lane in attention_of(launches).attention if lane.tokens), key=_of_lane), key=_of_lane):
            parts = list(lanes)
            row, end = closeup.table[key[0]], parts[0].first_position + len(parts[0].tokens)
            first = 0 if closeup.sliding_window is None else max(0, parts[0].first_position - closeup.sliding_window + 1)
            steps = [step for lane in parts for step in lane.tiles]
            assert [position for step in steps for position in range(*step.positions)] == list(range(first, end))
            for step in steps:
                expected = [slot_arithmetic(position, row.block_ids, block_size=BLOCK_SIZE) for position in range(*step.positions)]
                assert list(slots_in(step.slots)) == [at.slot for at in expected]
                assert list(range(*step.columns)) == list(dict.fromkeys(at.column for at in expected))
                assert step.block_ids == list(dict.fromkeys(at.block_id for at in expected))
    for lane in attention_of(closeup.gpu).attention:
        assert isinstance(size, int)
        assert all(step.positions[0] // size == (step.positions[1] - 1) // size for step in lane.tiles)


def _of_lane(lane: LaneCloseup) -> tuple[int, int, int]:
    assert lane.row is not None
    return lane.row, lane.first_position, lane.kv_head


def test_maxima_and_totals_are_those_of_online_softmax_in_float64(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    closeup, inputs, _, _ = case
    keys = [both[0] for both in keys_and_values(inputs)]
    checked = 0
    for launches in (closeup.gpu, closeup.interpreted):
        for lane in attention_of(launches).attention:
            for row in lane.rows:
                assert lane.row is not None
                position = lane.first_position + row.token - lane.tokens[0]
                scores = keys[lane.row][:, lane.kv_head] @ inputs.query[row.token, row.q_head].double() * closeup.scale * math.log2(math.e)
                visible = torch.arange(len(scores)) <= position
                if closeup.sliding_window is not None:
                    visible &= torch.arange(len(scores)) > position - closeup.sliding_window
                start = lane.tiles[0].positions[0]
                assert len(row.maxima) == len(row.totals) == len(lane.tiles)
                for step, maximum, total in zip(lane.tiles, row.maxima, row.totals, strict=True):
                    seen = scores[start : step.positions[1]][visible[start : step.positions[1]]]
                    if not len(seen):
                        assert maximum == pytest.approx(NOTHING_SEEN)
                        continue
                    assert maximum == pytest.approx(float(seen.max()), abs=1e-4)
                    assert total == pytest.approx(float(torch.exp2(seen - seen.max()).sum()), rel=1e-4)
                    checked += 1
    assert checked > 50


def test_reference_and_triton_are_attention_in_float64(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    closeup, inputs, _, _ = case
    comparison = closeup.comparison
    assert (comparison.head_dim, comparison.num_shown) == (closeup.head_dim, 8)
    memory = keys_and_values(inputs)
    group = closeup.num_q_heads // closeup.num_kv_heads
    for row in closeup.table:
        keys, values = memory[row.row]
        for token, head in itertools.product(range(*row.tokens), range(closeup.num_q_heads)):
            position = row.first_position + token - row.tokens[0]
            first = 0 if closeup.sliding_window is None else max(0, position - closeup.sliding_window + 1)
            weights = torch.softmax(keys[first : position + 1, head // group] @ inputs.query[token, head].double() * closeup.scale, 0)
            expected = (weights @ values[first : position + 1, head // group])[:8].tolist()
            assert comparison.reference[token][head] == pytest.approx(expected, abs=1e-4)
            assert comparison.triton[token][head] == pytest.approx(expected, abs=1e-4)
            shown = max(abs(a - b) for a, b in zip(comparison.reference[token][head], comparison.triton[token][head], strict=True))
            assert shown <= comparison.difference[token][head] <= comparison.largest < 1e-4
    assert comparison.largest == max(map(max, comparison.difference))


def test_r8_4_r8_5_table_and_slots_are_those_of_the_trace(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    closeup, _, _, run = case
    frames = [frame for frame in run.trace.frames if frame.step == closeup.step]
    mapped = [frame.event for frame in frames if isinstance(frame.event, SlotsMapped) and (frame.event.group_id or 0) == closeup.group_id]
    event = next(frame.event for frame in frames if isinstance(frame.event, AttentionComputed))
    rows = next(frame.rows for frame in frames if isinstance(frame.event, AttentionComputed))
    assert [row.request_id for row in closeup.table] == event.request_ids
    assert [(row.request_id, row.first_position, row.slots) for row in closeup.table] == [(e.request_id, e.positions[0], e.slots) for e in mapped]
    assert [(row.row, tuple(row.block_ids)) for row in closeup.table] == [(row.row, row.block_ids[closeup.group_id]) for row in rows]


def test_lines_are_counted_by_statement(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    """By hand: everything before the loop once per program, everything in it once per tile of each program, branches that are compiled away never."""
    closeup, _, _, _ = case
    launch = attention_of(closeup.gpu)
    source = next(source for source in closeup.sources if source.kernel == launch.kernel)

    def count(text: str) -> int:
        found = [source.first_line + place for place, line in enumerate(source.lines) if line.strip().startswith(text)]
        assert found, text
        return launch.lines[found[0]]

    programs, walks = math.prod(launch.grid), sum(len(lane.tiles) for lane in launch.attention)
    assert count("query_len = tl.load(") == count("row_ptr = ") == programs
    assert count("for tile in range(") == count("key = tl.load(") == count("scores = tl.dot(") == walks
    assert count("if WITNESS:") == programs
    assert count("witness_row = ") == 0
    assert count("first_key = tl.maximum(") == (0 if closeup.sliding_window is None else programs)
    comments = [source.first_line + place for place, line in enumerate(source.lines) if not line.strip() or line.strip().startswith("#")]
    assert not set(comments) & set(launch.lines)
    writes = next(launch for launch in closeup.gpu if launch.kernel == "reshape_and_cache_kernel")
    assert set(writes.lines.values()) == {0, writes.grid[0]}


def test_programs_of_writes_name_every_token_with_its_slot(case: tuple[KernelCloseup, LayerInputs, int | None, Session]) -> None:
    closeup, _, _, _ = case
    on_gpu, in_run = (next(launch for launch in launches if launch.kernel == "reshape_and_cache_kernel") for launches in (closeup.gpu, closeup.interpreted))
    expected = [f"{row.request_id}: token {token} to slot {slot}" for row in closeup.table for token, slot in zip(range(*row.tokens), row.slots, strict=True)]
    assert on_gpu.programs_of == expected
    assert len(in_run.programs_of) == math.prod(in_run.grid)
    mapping = next(launch for launch in closeup.gpu if launch.kernel == "slot_mapping_kernel")
    assert len(mapping.programs_of) == len(closeup.table) + 1
    assert [text.split(":")[0] for text in mapping.programs_of[:-1]] == [row.request_id for row in closeup.table]
    places = "place 9" if closeup.table[-1].tokens[1] == 9 else f"places {closeup.table[-1].tokens[1]} to 9"
    assert mapping.programs_of[-1] == ("nothing" if closeup.table[-1].tokens[1] == 10 else f"-1 at the unused {places}")


@pytest.mark.parametrize(("model", "layer"), [("tiny", 0), ("tiny", 3), ("tiny-swa", 4)])
def test_outputs_are_those_of_the_layer_in_the_run_itself(monkeypatch: pytest.MonkeyPatch, model: str, layer: int) -> None:
    """What attention returns in the step is looked at while the run itself is there: one call for each layer, and in layer 0 one of the reference behind it."""
    outputs: list[torch.Tensor] = []
    attend = attention._attend

    def looked_at(query: torch.Tensor, key_cache: torch.Tensor, *rest: Any) -> torch.Tensor:
        output = attend(query, key_cache, *rest)
        outputs.append(output.clone())
        return output

    run = session(model)
    run.run_until(lambda frame: frame.step == 4 and frame.op == "schedule")
    monkeypatch.setattr(attention, "_attend", looked_at)
    run.run_until(lambda frame: frame.step == 4 and isinstance(frame.event, AttentionComputed))
    monkeypatch.undo()
    own = [outputs[0], *outputs[2:]]
    closeup = kernel_closeup(run, computed(run, 4), layer, 4)
    assert len(own) == closeup.num_layers
    torch.testing.assert_close(torch.tensor(closeup.comparison.triton), own[layer][:, :, :8], atol=1e-4, rtol=1e-4)


def test_interpreted_launches_are_those_that_the_run_was_seen_to_make() -> None:
    run = session(kernel_witness=True)
    seq = computed(run, 5)
    closeup = kernel_closeup(run, seq, 0)
    event = run.trace.frames[seq].event
    assert isinstance(event, AttentionComputed)
    assert event.witness is not None
    witness = next(launch for launch in event.witness if launch.kernel == "paged_attention")
    launch = attention_of(closeup.interpreted)
    assert (math.prod(launch.grid), launch.lanes) == (witness.grid, witness.lanes)
    seen = {(program.program, program.lane): (program.request_id, list(slots_in(program.slots_read))) for program in witness.programs}
    told = {(lane.program, lane.lane): (lane.request_id, [slot for step in lane.tiles for slot in slots_in(step.slots)]) for lane in launch.attention}
    assert {place: what for place, what in told.items() if what[0] is not None} == seen


def test_a_close_up_leaves_the_session_alone_and_is_the_same_each_time() -> None:
    run = session()
    seq = computed(run, 3)
    before = encode_json(run.trace)
    first, second = (kernel_closeup(run, seq, 1, 4) for _ in range(2))
    assert first == second
    assert encode_json(run.trace) == before


def test_any_frame_of_a_step_leads_to_the_same_close_up_also_before_it_is_recorded() -> None:
    run = session()
    run.run_to_end()
    frames = [frame.seq for frame in run.trace.frames if frame.step == 3]
    found = [kernel_closeup(session(), seq, 0, 4) for seq in (frames[0], computed(run, 3), frames[-1])]
    assert found[0] == found[1] == found[2]
    assert found[0].step == 3


def test_a_large_batch_is_shown_in_part_as_if_the_rest_had_been_computed_before() -> None:
    run = session()
    inputs = inputs_of(run, 5, 0)
    whole, none_left = shown_part(inputs, inputs.query.shape[0])
    assert (whole is inputs, none_left) == (True, 0)
    part, left_out = shown_part(inputs, 5)
    assert part.query.shape[0] + left_out == inputs.query.shape[0]
    assert part.query.shape[0] <= 5
    kept = [token for token in range(inputs.query.shape[0]) if bool((part.query == inputs.query[token]).all(dim=(1, 2)).any())]
    assert len(kept) == part.query.shape[0]
    outputs = []
    for its in (inputs, part):
        key_cache, value_cache = its.key_cache.clone(), its.value_cache.clone()
        key_cache.flatten(0, 1)[its.slot_mapping], value_cache.flatten(0, 1)[its.slot_mapping] = its.key, its.value
        table = (key_cache, value_cache, its.block_table, its.query_start_loc, its.seq_lens)
        outputs.append(paged_attention(its.query, *table, scale=its.scale, sliding_window=None, backend="torch"))
    torch.testing.assert_close(outputs[0][kept], outputs[1])


def test_left_out_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = session()
    seq = computed(run, 5)
    monkeypatch.setattr("engine.worker.closeup.shown_part", lambda inputs: shown_part(inputs, 4))
    closeup = kernel_closeup(run, seq, 0, 4)
    whole = inputs_of(run, 5, 0)
    assert closeup.left_out_tokens == whole.query.shape[0] - closeup.table[-1].tokens[1] > 0
    assert [row.first_position + row.tokens[1] - row.tokens[0] for row in closeup.table] == whole.seq_lens.tolist()
