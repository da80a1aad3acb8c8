"""What no close-up can be made of is refused in one sentence; close-ups of the paper's engine, of states beside attention, and of launches for GPUs."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from typing import Any

import pytest

from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.models import load_model, load_tokenizer
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper_session import PaperSession
from engine.session import RequestSpec, Session, SessionConfig
from engine.session_base import NO_MODEL
from engine.trace.closeup import CompiledKernel
from engine.trace.events import AttentionComputed, BlocksCopied, StateWritten
from engine.trace.witness import slots_in
from engine.worker.closeup import kernel_closeup
from engine.worker.closeup_compiled import TARGETS, compiled_kernels
from engine.worker.kernel_lines import source_of


def v1(model: str = "tiny", **settings: Any) -> Session:
    prompt = tuple(load_tokenizer("tiny").encode("Four score and seven years ago our fathers"))
    spec = RequestSpec("A", prompt, SamplingParams(max_tokens=3, forced_token_ids=(5, 6, 7)))
    return Session(SessionConfig(**{"num_blocks": 20, "block_size": 4, **settings}), (spec,), vocabulary=str, model_name=model)


def paper(**spec: Any) -> PaperSession:
    encode = load_model("tiny").tokenizer.encode
    prefix = PaperRequestSpec("P", tuple(encode("Four score and seven years ago")), is_prefix=True)
    request = PaperRequestSpec("A", tuple(encode("It was the best of times, it was")), **{"max_tokens": 4, "n": 2, **spec})
    return PaperSession(PaperConfig(num_blocks=40, block_size=4, kernel_witness=True), (prefix, request), vocabulary=str, model_name="tiny")


def first_computed(run: Session) -> int:
    frame = run.run_until(lambda frame: isinstance(frame.event, AttentionComputed))
    assert frame is not None
    return frame.seq


def test_a_run_without_a_model_has_no_kernels() -> None:
    with pytest.raises(InvalidInput, match="keeps the books only: no model runs"):
        kernel_closeup(v1(NO_MODEL), 5)


def test_a_frame_beyond_the_end_is_named_with_the_last_one() -> None:
    run = v1()
    last = len(run.run_to_end().frames) - 1
    with pytest.raises(InvalidInput, match=f"Frame {last + 1} does not exist: the run ends with frame {last}"):
        kernel_closeup(run, last + 1)
    with pytest.raises(InvalidInput, match="Frame -1 does not exist"):
        kernel_closeup(run, -1)


def test_a_step_in_which_nothing_was_computed_is_named() -> None:
    with pytest.raises(InvalidInput, match="Nothing was computed in step 0"):
        kernel_closeup(v1(), 0)


@pytest.mark.parametrize(("layer", "message"), [(4, "There is no layer 4: the 4 layers are 0 to 3"), (-1, "There is no layer -1")])
def test_a_layer_that_the_model_does_not_have_is_refused(layer: int, message: str) -> None:
    run = v1()
    with pytest.raises(InvalidInput, match=message):
        kernel_closeup(run, first_computed(run), layer)


def test_a_layer_with_a_state_has_no_attention_kernels() -> None:
    """`tiny-hybrid`: attention in layers 0, 2, 4, a recurrent state in the others."""
    run = v1("tiny-hybrid")
    seq = first_computed(run)
    with pytest.raises(InvalidInput, match=r"Layer 1 keeps a recurrent state and has no attention.*choose one of 0, 2, 4"):
        kernel_closeup(run, seq, 1)
    closeup = kernel_closeup(run, seq, 2, 4)
    assert (closeup.layer, closeup.num_layers, closeup.attention_layers, closeup.group_id) == (2, 6, [0, 2, 4], 0)
    assert any(isinstance(frame.event, StateWritten) for frame in run.trace.frames)


@pytest.mark.parametrize("tile", [0, 3, -4])
def test_a_tile_is_a_power_of_two(tile: int) -> None:
    run = v1()
    with pytest.raises(InvalidInput, match=f"A tile of {tile} keys cannot be"):
        kernel_closeup(run, first_computed(run), 0, tile)


def test_without_triton_nothing_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    run = v1()
    seq = first_computed(run)
    closeup = kernel_closeup(run, seq)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest))
    with pytest.raises(InvalidInput, match=r"cannot be watched on this machine.*Triton is not installed"):
        kernel_closeup(run, seq)
    refused = compiled_kernels(closeup)
    assert {kernel.error for kernel in refused} == {"Triton is not installed, so nothing can be compiled."}
    assert {kernel.target for kernel in refused} == set(TARGETS)


def test_the_error_that_stopped_a_run_is_told() -> None:
    run = v1(max_model_len=100_000)
    run.run_to_end()
    assert run.error is not None
    with pytest.raises(type(run.error), match="positions"):
        kernel_closeup(run, len(run.trace.frames) + 5)


def test_section_4_4_a_copy_on_write_is_launched_before_the_rest() -> None:
    """Two samples of one prompt of 9 tokens: the last block is shared and half full, so the first to write to it copies it."""
    run = paper()
    copied = run.run_until(lambda frame: isinstance(frame.event, BlocksCopied))
    assert copied is not None
    assert isinstance(copied.event, BlocksCopied)
    (source,), (target,) = copied.event.source_block_ids, copied.event.destination_block_ids
    closeup = kernel_closeup(run, copied.seq)
    kernels = [launch.kernel for launch in closeup.gpu]
    assert kernels == sorted(kernels, key=["copy_pages_kernel", "slot_mapping_kernel", "reshape_and_cache_kernel", "paged_attention_kernel"].index)
    texts = [text for launch in closeup.gpu if launch.kernel == "copy_pages_kernel" for text in launch.programs_of]
    assert texts
    assert all(f"block {source} to block {target}" in text for text in texts)
    assert {row.request_id for row in closeup.table} == set(copied.scheduled)


def test_the_papers_prefixes_are_computed_in_step_0() -> None:
    run = paper()
    schedule = run.run_until(lambda frame: frame.op == "schedule")
    assert schedule is not None
    closeup = kernel_closeup(run, schedule.seq)
    assert closeup.step == 0
    assert [(row.request_id, row.first_position) for row in closeup.table] == [("P", 0)]


def test_each_of_several_iterations_with_one_step_number_is_found() -> None:
    """Two prefixes that do not fit into one iteration: both iterations are step 0. A plan leads to the pass after it, an update comes from the one before."""
    encode = load_model("tiny").tokenizer.encode
    prefixes = [PaperRequestSpec(name, tuple(encode(text)), is_prefix=True) for name, text in (("P", "Call me Ishmael."), ("Q", "It was the best of times"))]
    request = PaperRequestSpec("A", tuple(encode("It was")), max_tokens=2)
    config = PaperConfig(num_blocks=40, block_size=4, max_num_batched_tokens=7, max_num_seqs=7)
    run = PaperSession(config, (*prefixes, request), vocabulary=str, model_name="tiny")
    run.run_to_end()
    whose = [event.request_ids for frame in run.trace.frames if frame.step == 0 and isinstance(event := frame.event, AttentionComputed)]
    assert len(whose) == 2
    assert whose[0] != whose[1]
    plans = [frame.seq for frame in run.trace.frames if frame.step == 0 and frame.op == "schedule"]
    passes = [frame.seq for frame in run.trace.frames if frame.step == 0 and isinstance(frame.event, AttentionComputed)]
    last_plan_of_second = max(seq for seq in plans if passes[0] < seq < passes[1])
    assert [[row.request_id for row in kernel_closeup(run, seq).table] for seq in (plans[0], passes[0], last_plan_of_second)] == [whose[0], whose[0], whose[1]]


def test_a_long_context_of_one_request_is_split_over_programs() -> None:
    """Decoding alone behind 480 tokens: what the splits of a query block walk is together what one program would."""
    spec = RequestSpec("A", tuple(5 + place % 300 for place in range(480)), SamplingParams(max_tokens=2, forced_token_ids=(5, 6)))
    run = Session(SessionConfig(num_blocks=40, block_size=16, max_num_batched_tokens=480), (spec,), vocabulary=str, model_name="tiny")
    frame = run.run_until(lambda frame: frame.step == 2 and isinstance(frame.event, AttentionComputed))
    assert frame is not None
    closeup = kernel_closeup(run, frame.seq)
    launch = next(launch for launch in closeup.gpu if launch.kernel == "paged_attention_kernel")
    assert len(launch.grid) == 2
    assert len(launch.attention) == math.prod(launch.grid)
    for kv_head in range(closeup.num_kv_heads):
        slots = [slot for lane in launch.attention if lane.kv_head == kv_head for step in lane.tiles for slot in slots_in(step.slots)]
        assert slots == [block * 16 + place for block in closeup.table[0].block_ids for place in range(16)][:481]
    assert closeup.gpu[-1].kernel == "reduce_splits_kernel"
    assert closeup.gpu[-1].programs_of == [f"A: token 0, query head {head}, from {launch.grid[1]} splits" for head in range(8)]
    assert closeup.comparison.largest < 1e-4
    compiled = compiled_kernels(closeup)
    assert {kernel.kernel for kernel in compiled} == {launch.kernel for launch in closeup.gpu}
    assert {kernel.error for kernel in compiled} == {None}


def test_kernels_are_compiled_in_the_shape_of_a_gpu_whatever_tile_was_looked_at() -> None:
    run = v1()
    seq = first_computed(run)
    small, usual = (compiled_kernels(kernel_closeup(run, seq, 0, tile)) for tile in (2, None))
    assert small == usual
    assert [kernel.target for kernel in small[:3]] == list(TARGETS)
    assert {kernel.kernel for kernel in small} == {"slot_mapping_kernel", "reshape_and_cache_kernel", "paged_attention_kernel"}
    for kernel in small:
        assert kernel.error is None
        assert min(kernel.assembly_bytes, kernel.binary_bytes, kernel.registers) > 0
    assert all(isinstance(kernel, CompiledKernel) and kernel.shared_bytes > 0 for kernel in small if kernel.kernel == "paged_attention_kernel")


def test_where_triton_only_interprets_the_kernels_are_watched_and_not_compiled() -> None:
    """TRITON_INTERPRET is read when Triton is imported, hence a process of its own."""
    program = """
from scenarios.closeup import closeup_at, compiled_at
closeup = closeup_at("figure-6-v1", 12, tile=4)
print(len(closeup.gpu), {kernel.error for kernel in compiled_at(closeup)})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"TRITON_INTERPRET": "1", "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3 {'Nothing can be compiled while TRITON_INTERPRET is set; unset it and start again.'}"


@pytest.mark.parametrize("kernel", ["slot_mapping_kernel", "reshape_and_cache_kernel", "paged_attention_kernel", "copy_pages_kernel"])
def test_the_source_of_a_kernel_has_the_lines_of_its_file(kernel: str) -> None:
    source = source_of(kernel)
    with open(source.file, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert lines[source.first_line - 1 : source.first_line - 1 + len(source.lines)] == source.lines
    assert source.lines[0].startswith("@triton.jit")
    assert source.lines[1] == f"def {kernel}("
