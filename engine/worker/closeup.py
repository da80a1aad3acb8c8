"""A close-up of the kernels of one step: the run is repeated up to that step, and the kernels are launched again on what one layer was given there.

What the run itself keeps is not enough: a trace has no tensors. It is deterministic, so a fresh session of the same inputs comes to the same step with the
same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import InvalidInput
from engine.session_base import NO_MODEL, SessionBase
from engine.trace.closeup import Comparison, KernelCloseup, TableRow
from engine.trace.events import AttentionComputed, BlocksCopied
from engine.trace.frame import Frame
from engine.worker.closeup_launches import Relaunch, launch_again
from engine.worker.closeup_part import shown_part
from engine.worker.kernel_lines import source_of
from engine.worker.layer_capture import LayerCapture, LayerInputs
from kernels import Backend, UnknownBackend, choose_backend, interpreted_like_gpu, paged_attention

NUM_SHOWN = 8
"""Numbers of an output vector that a comparison carries along."""


def kernel_closeup(session: SessionBase[Any, Any], seq: int, layer: int | None = None, tile: int | None = None) -> KernelCloseup:
    """What the kernels do in attention layer `layer` (None: the first) in the engine step that frame `seq` of the session belongs to.

    session: any run of V1's engine or the paper's on a model; it is left alone, a fresh one of the same inputs is run up to that step. tile: keys per iteration
    of the attention kernel in the `gpu` launches, a power of two (None: as many as on a GPU, which is more than a short context has); take the block size to
    see one block per iteration. Of a batch of more than 256 tokens only a part is shown (`KernelCloseup.left_out_tokens`). Everything runs on the CPU; models
    are loaded once per process.

    Raises InvalidInput, in one sentence, for a run without a model, a frame that the run does not have, a step in which nothing was computed, a layer without
    keys and values, an impossible tile, and where Triton cannot interpret; and whatever stopped the run, when it did not get there.
    """
    gpu, interpreted = _backends(tile)
    step = _run_to(session, seq, layer)
    with torch.inference_mode():
        inputs, left_out_tokens = shown_part(step.inputs)
    launched = [
        launch_again(inputs, step.request_ids, step.copies, max_num_batched_tokens=session.config.max_num_batched_tokens, backend=backend)
        for backend in (gpu, interpreted)
    ]
    kernels = dict.fromkeys(launch.kernel for done in launched for launch in done.launches)
    return KernelCloseup(
        step=step.number,
        layer=step.layer,
        num_layers=step.num_layers,
        attention_layers=step.attention_layers,
        group_id=inputs.group_id,
        block_size=inputs.key_cache.shape[1],
        num_q_heads=inputs.query.shape[1],
        num_kv_heads=inputs.key.shape[1],
        head_dim=inputs.query.shape[2],
        sliding_window=inputs.sliding_window,
        scale=inputs.scale,
        table=_table(inputs, step.request_ids, launched[0].slots),
        gpu=launched[0].launches,
        interpreted=launched[1].launches,
        sources=[source_of(kernel) for kernel in kernels],
        comparison=_compare(inputs, launched[0]),
        left_out_tokens=left_out_tokens,
    )


def _backends(tile: int | None) -> tuple[Backend, Backend]:
    try:
        return interpreted_like_gpu(tile=tile), choose_backend("interpret", "cpu")
    except UnknownBackend as error:
        raise InvalidInput(f"The kernels cannot be watched on this machine, on which only the torch reference runs and has no programs: {error}") from error
    except ValueError as error:
        raise InvalidInput(str(error)) from error


# ---------------------------------------------------------------------- the step, once more


@dataclass(frozen=True)
class _Step:
    """A step of the repeated run: what the layer was given in it, whose the batch's rows were, and which pages were copied before."""

    number: int
    layer: int
    num_layers: int
    attention_layers: list[int]
    inputs: LayerInputs
    request_ids: list[str]
    copies: list[tuple[int, int]]


def _run_to(session: SessionBase[Any, Any], seq: int, layer: int | None) -> _Step:
    """Run a fresh session until the forward pass of the step that frame `seq` belongs to, and stop there.

    Of several passes with the same step number (the paper's engine computes its prefixes in step 0) it is the one that a frame of `schedule` leads to and that
    any later frame comes from."""
    if session.trace.header.model["name"] == NO_MODEL:
        raise InvalidInput("This run keeps the books only: no model runs, so no kernel does; choose a scene with a model, or give it one.")
    if seq < 0:
        raise InvalidInput(f"Frame {seq} does not exist: frames are counted from 0.")
    # What is only looked at need not be recorded again; frames stay the same in number.
    again = session.fresh(kernel_witness=False, attention_shares=False)
    capture = LayerCapture(layer)
    again.capture_layer(capture)
    frames = again.trace.frames
    latest: tuple[Frame, LayerInputs] | None = None
    seen = 0
    while again.advance():
        _check_layer(again, capture, layer)
        computed = next((frame for frame in frames[seen:] if isinstance(frame.event, AttentionComputed)), None)
        seen = len(frames)
        if computed is not None and capture.inputs is not None and (seen <= seq or computed.step == frames[seq].step):
            latest = (computed, capture.inputs)
        if seen <= seq:
            continue
        wanted = frames[seq]
        if latest is not None and latest[0].step == wanted.step and (wanted.op != "schedule" or latest[0].seq > seq):
            break
        if frames[-1].step > wanted.step:  # the next step is planned, so this one has been executed
            break
    if latest is not None and len(frames) > seq and latest[0].step == frames[seq].step:
        return _step(again, capture, *latest)
    if again.error is not None:
        raise again.error
    if len(frames) <= seq:
        raise InvalidInput(f"Frame {seq} does not exist: the run ends with frame {len(frames) - 1}; choose an earlier one.")
    raise InvalidInput(f"Nothing was computed in step {frames[seq].step}, so no kernel ran; choose a step in which the model was executed.")


def _step(session: SessionBase[Any, Any], capture: LayerCapture, frame: Frame, inputs: LayerInputs) -> _Step:
    assert isinstance(frame.event, AttentionComputed)
    assert capture.layer is not None
    copies: list[tuple[int, int]] = []
    for before in reversed(session.trace.frames[: frame.seq]):
        if before.op_index != frame.op_index:
            break
        if isinstance(before.event, BlocksCopied):
            copies[:0] = zip(before.event.source_block_ids, before.event.destination_block_ids, strict=True)
    return _Step(
        number=frame.step,
        layer=capture.layer,
        num_layers=int(session.trace.header.model["num_layers"]),
        attention_layers=sorted(capture.attention_layers),
        inputs=inputs,
        request_ids=list(frame.event.request_ids),
        copies=copies,
    )


def _check_layer(session: SessionBase[Any, Any], capture: LayerCapture, layer: int | None) -> None:
    """As soon as the model has run once it is known which layers have attention."""
    if layer is None or not capture.attention_layers or layer in capture.attention_layers:
        return
    num_layers = int(session.trace.header.model["num_layers"])
    with_attention = ", ".join(map(str, sorted(capture.attention_layers)))
    if 0 <= layer < num_layers:
        raise InvalidInput(f"Layer {layer} keeps a recurrent state and has no attention, so these kernels do not run in it; choose one of {with_attention}.")
    raise InvalidInput(f"There is no layer {layer}: the {num_layers} layers are 0 to {num_layers - 1}; those with attention are {with_attention}.")


# ---------------------------------------------------------------------- what is said of it


def _table(inputs: LayerInputs, request_ids: Sequence[str], slots: Sequence[int]) -> list[TableRow]:
    block_size = inputs.key_cache.shape[1]
    starts = inputs.query_start_loc.tolist()
    rows = []
    for row, (request_id, seq_len, ids) in enumerate(zip(request_ids, inputs.seq_lens.tolist(), inputs.block_table.tolist(), strict=True)):
        tokens = (starts[row], starts[row + 1])
        rows.append(
            TableRow(
                request_id=request_id,
                row=row,
                block_ids=ids[: -(-seq_len // block_size)],
                tokens=tokens,
                first_position=seq_len - (tokens[1] - tokens[0]),
                slots=list(slots[tokens[0] : tokens[1]]),
            )
        )
    return rows


@torch.inference_mode()
def _compare(inputs: LayerInputs, done: Relaunch) -> Comparison:
    """The torch reference on the same caches against what the watched kernel gave."""
    reference = paged_attention(
        inputs.query,
        done.key_cache,
        done.value_cache,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.seq_lens,
        scale=inputs.scale,
        sliding_window=inputs.sliding_window,
        backend="torch",
    )
    difference = (reference.float() - done.output.float()).abs().amax(dim=2)
    head_dim = inputs.query.shape[2]
    num_shown = min(NUM_SHOWN, head_dim)
    return Comparison(
        reference=reference[:, :, :num_shown].tolist(),
        triton=done.output[:, :, :num_shown].tolist(),
        num_shown=num_shown,
        head_dim=head_dim,
        difference=difference.tolist(),
        largest=float(difference.max()),
    )
