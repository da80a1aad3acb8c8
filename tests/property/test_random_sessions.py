"""Random scenarios through the whole engine without a model: every frame is checked by the ledger, every request gets its tokens, nothing leaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.output import SamplingParams
from engine.session import RequestSpec, Session, SessionConfig
from engine.trace import codec
from engine.trace.events import KVWritten
from engine.trace.integrity import check_integrity

BLOCK_SIZE = 4


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[SessionConfig, tuple[RequestSpec, ...]]:
    """Small pools and few distinct tokens, so that prefixes are shared, blocks run out and requests are preempted."""
    num_blocks = draw(st.integers(5, 14))
    capacity = (num_blocks - 1) * BLOCK_SIZE
    requests = []
    for index in range(draw(st.integers(1, 4))):
        num_prompt = draw(st.integers(1, min(14, capacity - 1)))
        num_outputs = draw(st.integers(1, min(8, capacity - num_prompt)))
        shared = draw(st.integers(0, num_prompt))
        prompt = [*range(shared), *(draw(st.integers(0, 2)) for _ in range(num_prompt - shared))]
        outputs = tuple(draw(st.integers(0, 2)) for _ in range(num_outputs))
        params = SamplingParams(max_tokens=num_outputs, forced_token_ids=outputs)
        requests.append(RequestSpec(f"R{index}", tuple(prompt), params, arrival_step=draw(st.integers(1, 6))))
    config = SessionConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=draw(st.booleans()),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([4, 7, 64])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 3])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        scheduler_reserve_full_isl=draw(st.booleans()),
    )
    return config, tuple(requests)


@given(scenarios())
def test_every_run_ends_well(scenario: tuple[SessionConfig, tuple[RequestSpec, ...]]) -> None:
    config, requests = scenario
    session = Session(config, requests, vocabulary=str)
    trace = session.run_to_end()
    assert session.error is None, session.error
    assert trace.complete
    last = trace.frames[-1]
    for spec in requests:
        state = last.request(spec.request_id)
        assert state is not None
        assert state.token_ids == spec.prompt_token_ids + spec.sampling_params.forced_token_ids
        assert state.status == "FINISHED_LENGTH_CAPPED"
    assert sorted(last.free_queue) == list(range(1, config.num_blocks))
    for previous, frame in zip([None, *trace.frames], trace.frames, strict=False):
        assert check_integrity(frame, previous) == []


@given(scenarios())
def test_what_lies_in_a_block_is_what_its_owner_says(scenario: tuple[SessionConfig, tuple[RequestSpec, ...]]) -> None:
    """R8.4 end to end: after each write, the token in the slot of position p is the request's token p."""
    config, requests = scenario
    trace = Session(config, requests, vocabulary=str).run_to_end()
    for frame in trace.frames:
        if not isinstance(frame.event, KVWritten) or frame.event.request_id is None:
            continue
        state = frame.request(frame.event.request_id)
        assert state is not None
        for position in range(state.num_computed_tokens):
            block = frame.blocks[state.block_ids[0][position // BLOCK_SIZE]]
            assert block.token_ids[position % BLOCK_SIZE] in (state.token_ids[position], None)


@given(scenarios())
def test_the_same_scenario_is_the_same_file(scenario: tuple[SessionConfig, tuple[RequestSpec, ...]]) -> None:
    config, requests = scenario
    first, second = (codec.encode_json(Session(config, requests, vocabulary=str).run_to_end()) for _ in range(2))
    assert first == second
    assert codec.encode_json(codec.decode_json(first)) == first
