"""Random runs with every kind of KV-cache group through session, bookkeeping worker and recorder.

After each event the snapshot that was made from what the event touched must equal one that is read afresh, and the check that counts on from frame to
frame must find as little as the one that looks at whole frames.
"""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import assume, given
from hypothesis import strategies as st

from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.group_config import GroupConfig
from engine.session import Session
from engine.session_config import ActionSpec, RequestSpec, SessionConfig
from engine.trace import codec, running_check
from engine.trace.integrity import ABOUT_CONTENTS, check_integrity

FULL, WINDOW = GroupConfig(), GroupConfig("sliding_window", sliding_window=8)
ALIGN = GroupConfig("mamba", block_size=8, mamba_cache_mode="align")
ALIGN_DRAFTS = GroupConfig("mamba", block_size=8, mamba_cache_mode="align", num_speculative_blocks=1)
FINE = GroupConfig(block_size=4)
COARSE = GroupConfig(block_size=8)

MIXES: list[tuple[int, tuple[GroupConfig, ...], dict[str, object]]] = [
    (4, (), {}),
    (4, (GroupConfig("mla"),), {}),
    (4, (GroupConfig("sliding_window", sliding_window=6),), {}),
    (4, (GroupConfig("chunked_local", attention_chunk_size=8),), {}),
    (4, (GroupConfig("rswa", rswa_window=5),), {}),
    (4, (FULL,), {"decode_context_parallel_size": 2}),
    (4, (FULL, WINDOW), {}),
    (4, (FULL, WINDOW), {"retention_interval": 8}),
    (8, (COARSE, GroupConfig("sliding_window", block_size=4, sliding_window=6)), {}),
    (4, (FULL, WINDOW, GroupConfig("sliding_window", sliding_window=16)), {}),
    (4, (FULL, GroupConfig("chunked_local", attention_chunk_size=8)), {}),
    (4, (FINE, GroupConfig("mamba", block_size=8, mamba_cache_mode="all")), {}),
    (4, (FULL, GroupConfig("mamba", block_size=64, mamba_cache_mode="none")), {"enable_prefix_caching": False}),
    (8, (FINE, ALIGN), {}),
    (8, (FINE, ALIGN_DRAFTS), {}),
    (8, (COARSE, ALIGN), {"prefix_match_unit": 4}),
    (8, (COARSE, ALIGN_DRAFTS), {"prefix_match_unit": 2}),
]


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Small pools and few distinct tokens, so that prefixes are shared, hits end inside blocks, windows move on and requests are preempted."""
    block_size, groups, more = draw(st.sampled_from(MIXES))
    num_blocks = draw(st.integers(8, 40))
    requests = []
    for index in range(draw(st.integers(1, 5))):
        num_prompt, num_outputs = draw(st.integers(1, 26)), draw(st.integers(1, 9))
        shared = draw(st.integers(0, num_prompt))
        prompt = (*range(shared), *(draw(st.integers(0, 1)) for _ in range(num_prompt - shared)))
        params = SamplingParams(max_tokens=num_outputs, forced_token_ids=tuple(draw(st.integers(0, 1)) for _ in range(num_outputs)))
        requests.append(RequestSpec(f"R{index}", prompt, params, arrival_step=draw(st.integers(1, 12)), priority=draw(st.integers(0, 2))))
    steps = st.integers(1, 15)
    actions = draw(
        st.lists(
            st.one_of(
                st.builds(ActionSpec, steps, st.just("reset_prefix_cache")),
                st.builds(ActionSpec, steps, st.just("abort"), st.just("R0")),
                st.builds(ActionSpec, steps, st.just("evict_blocks"), block_ids=st.tuples(st.integers(1, num_blocks - 1))),
            ),
            max_size=2,
        )
    )
    settings = {
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.sampled_from([8, 16, 64])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "compat": draw(st.sampled_from([None, None, None, "0.27.0"])),
        **more,
    }
    try:
        config = SessionConfig(num_blocks=num_blocks, block_size=block_size, kv_cache_groups=groups, max_model_len=64, **settings)  # type: ignore[arg-type]
        return Session(config, tuple(requests), tuple(actions), vocabulary=str)
    except InvalidInput:
        assume(False)
        raise


@given(sessions())
def test_what_an_event_touched_is_all_that_changed(session: Session) -> None:
    session._capture.verify = True
    with patch.object(running_check, "SMALL_POOL", 0), patch.object(running_check, "BLOCKS_PER_FRAME", 1):
        trace = session.run_to_end()
    assert session.error is None, session.error
    tolerated = ABOUT_CONTENTS if session.config.compat else ()
    for before, frame in zip([None, *trace.frames], trace.frames, strict=False):
        assert [v for v in check_integrity(frame, before) if v.invariant not in tolerated] == []


@given(sessions())
def test_a_file_gives_the_run_back(session: Session) -> None:
    trace = session.run_to_end()
    data = codec.encode_json(trace)
    back = codec.decode_json(data)
    assert back == trace
    assert codec.encode_json(back) == data
