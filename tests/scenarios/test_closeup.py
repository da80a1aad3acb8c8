"""One call from a scene and a frame to what its kernels did there."""

from __future__ import annotations

import pytest

from engine.errors import InvalidInput
from engine.trace.events import AttentionComputed
from scenarios import ScenarioError, open_session
from scenarios.closeup import closeup_at, compiled_at


def test_figure_6_on_v1_maps_and_walks_the_blocks_of_its_trace() -> None:
    session = open_session("figure-6-v1")
    frame = session.run_until(lambda frame: isinstance(frame.event, AttentionComputed))
    assert frame is not None
    closeup = closeup_at("figure-6-v1", frame.seq, tile=4)
    assert closeup == closeup_at(session, frame.seq, tile=4)
    assert [slot for row in closeup.table for slot in row.slots] == list(frame.slot_mapping)
    assert [(row.request_id, tuple(row.block_ids)) for row in closeup.table] == [(row.request_id, row.block_ids[0]) for row in frame.rows]


def test_another_model_than_the_scenes_own() -> None:
    closeup = closeup_at("chunked-prefill", 15, 1, 4, model="tiny-swa")
    assert (closeup.layer, closeup.num_layers, closeup.sliding_window) == (1, 6, 8)


def test_what_cannot_be_opened_is_refused_as_everywhere() -> None:
    with pytest.raises((InvalidInput, ScenarioError), match="no-such-scene"):
        closeup_at("no-such-scene", 3)
    with pytest.raises(InvalidInput, match="no-such-model"):
        closeup_at("figure-6-v1", 3, model="no-such-model")


def test_compiled_kernels_are_those_of_the_close_up() -> None:
    closeup = closeup_at("figure-6-v1", 12)
    assert {kernel.kernel for kernel in compiled_at(closeup)} == {launch.kernel for launch in closeup.gpu}
