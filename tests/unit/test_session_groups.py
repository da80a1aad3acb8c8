"""Sessions beyond one full-attention group, without a model: groups, ranks, asynchronous scheduling, and what a scenario does to the pool. Loads no torch."""

from __future__ import annotations

import pytest

from engine.core.block_hash import MultiModalFeature
from engine.core.output import SamplingParams
from engine.errors import EngineError, InvalidInput
from engine.group_config import GroupConfig
from engine.session import ActionSpec, RequestSpec, Session, SessionConfig
from engine.trace import codec
from engine.trace.events import BlockCached, BlockEvicted, BlocksFreed, EngineFailed, PrefixLookup, RequestFinished, StepScheduled, TokenSampled, TraceStarted
from engine.trace.frame import Frame, Trace

FULL = GroupConfig()
SWA = GroupConfig("sliding_window", sliding_window=8)
MAMBA = GroupConfig("mamba", block_size=4, mamba_cache_mode="align")


def request(request_id: str, num_prompt: int, num_outputs: int = 1, *, base: int = 0, arrival_step: int = 1, **more: object) -> RequestSpec:
    params = SamplingParams(max_tokens=num_outputs, forced_token_ids=tuple(range(900, 900 + num_outputs)))
    return RequestSpec(request_id, tuple(range(base, base + num_prompt)), params, arrival_step=arrival_step, **more)  # type: ignore[arg-type]


def session(config: SessionConfig, *requests: RequestSpec, actions: tuple[ActionSpec, ...] = ()) -> Session:
    return Session(config, requests, actions, vocabulary=str)


def events(trace: Trace, kind: type, request_id: str | None = None) -> list[Frame]:
    return [f for f in trace.frames if isinstance(f.event, kind) and request_id in (None, f.event.request_id)]


def test_the_first_frame_and_the_header_name_the_groups() -> None:
    config = SessionConfig(num_blocks=24, block_size=8, kv_cache_groups=(FULL, GroupConfig("sliding_window", block_size=4, sliding_window=8)))
    trace = session(config, request("A", 16)).run_to_end()
    started = trace.frames[0].event
    assert isinstance(started, TraceStarted)
    assert (started.block_size, started.group_block_sizes) == (8, [8, 4])
    assert [(g["kind"], g["block_size"]) for g in trace.header.config["kv_cache_groups"]] == [("full_attention", 8), ("sliding_window", 4)]
    assert (trace.header.config["scheduler_block_size"], trace.header.config["hash_block_size"]) == (8, 4)  # R2.6
    assert trace.complete
    assert codec.decode_json(codec.encode_json(trace)) == trace


def test_one_group_has_no_list_of_sizes() -> None:
    started = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7)).run_to_end().frames[0].event
    assert isinstance(started, TraceStarted)
    assert started.group_block_sizes == []


@pytest.mark.parametrize(
    "groups",
    [
        (GroupConfig("mla"),),
        (SWA,),
        (GroupConfig("chunked_local", attention_chunk_size=8),),
        (GroupConfig("rswa", rswa_window=4),),
        (GroupConfig("mamba", mamba_cache_mode="all"),),
        (GroupConfig("mamba", mamba_cache_mode="align", num_speculative_blocks=1),),
        (FULL, SWA),
        (FULL, GroupConfig("chunked_local", attention_chunk_size=8)),
        (FULL, MAMBA),
        (FULL, SWA, GroupConfig("sliding_window", sliding_window=16)),
    ],
    ids=lambda groups: "-".join(g.type for g in groups),
)
def test_every_mix_of_groups_runs_to_its_end(groups: tuple[GroupConfig, ...]) -> None:
    """Two requests with a shared prefix, one of them in pieces; every frame passes the integrity check, or the recorder would have raised."""
    config = SessionConfig(num_blocks=40, block_size=4, kv_cache_groups=groups, max_num_batched_tokens=16)
    made = session(config, request("A", 22, 6), request("B", 18, 6, arrival_step=4))
    trace = made.run_to_end()
    assert made.error is None
    assert trace.complete
    assert {r.status for r in trace.frames[-1].requests} == {"FINISHED_LENGTH_CAPPED"}
    assert len(trace.frames[-1].free_queue) == 39
    assert all(len(r.block_ids) == len(groups) for r in trace.frames[-1].requests)


def test_states_without_caching() -> None:
    """R3.42: mode none is for caching off; one block per request, whatever its length."""
    groups = (GroupConfig("mamba", block_size=64, mamba_cache_mode="none"),)
    config = SessionConfig(num_blocks=6, block_size=64, enable_prefix_caching=False, kv_cache_groups=groups)
    trace = session(config, request("A", 10, 3)).run_to_end()
    assert [f.request("A").block_ids for f in events(trace, StepScheduled)] == [((1,),)] * 3  # type: ignore[union-attr]


def test_two_batches_in_flight() -> None:
    """R7.7: the second step is planned before the first one's token is known, so the block that it fills is hashed one step later than synchronously."""
    trace = session(SessionConfig(num_blocks=9, block_size=4, async_scheduling=True), request("A", 7, 4)).run_to_end()
    order = [f.op.split()[0] for f in trace.frames if isinstance(f.event, StepScheduled | TokenSampled)]
    assert order[:4] == ["schedule", "schedule", "update_from_output", "schedule"]
    sync = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7, 4)).run_to_end()
    assert [[f.step for f in events(t, BlockCached)] for t in (sync, trace)] == [[1, 2], [1, 3]]
    assert [f.event.token_id for f in events(trace, TokenSampled)] == [900, 901, 902, 903]  # type: ignore[attr-defined]
    assert events(trace, RequestFinished)
    assert trace.complete


def test_synchronously_a_step_is_over_before_the_next_one_is_planned() -> None:
    trace = session(SessionConfig(num_blocks=9, block_size=4), request("A", 7, 4)).run_to_end()
    order = [f.op.split()[0] for f in trace.frames if isinstance(f.event, StepScheduled | TokenSampled)]
    assert order == ["schedule", "update_from_output"] * 4


def test_a_block_on_two_ranks_holds_twice_as_many_tokens() -> None:
    """R2.6, R8.4: 12 tokens in blocks of 4 on two ranks are two blocks, one of them full and hashed."""
    config = SessionConfig(num_blocks=9, block_size=4, decode_context_parallel_size=2, dcp_rank=1)
    trace = session(config, request("A", 12)).run_to_end()
    done = events(trace, StepScheduled)[0]
    assert done.request("A").block_ids == ((1, 2),)  # type: ignore[union-attr]
    assert [b.block_id for b in done.blocks if b.block_hashes] == [1]
    written = [f for f in trace.frames if f.op == "execute_model"][-1]
    assert [written.blocks[b].token_ids for b in (1, 2)] == [(1, 3, 5, 7), (9, 11, None, None)]


def test_adapters_and_images_keep_blocks_apart() -> None:
    """R2.4: the same tokens under another adapter, or standing for another image, are another prefix."""
    image, other = MultiModalFeature("cat", 0, 4), MultiModalFeature("dog", 0, 4)
    requests = [
        request("A", 9, mm_features=(image,)),
        request("B", 9, arrival_step=2, mm_features=(other,)),
        request("C", 9, arrival_step=3, mm_features=(image,)),
        request("D", 9, arrival_step=4, mm_features=(image,), lora_name="adapter"),
    ]
    trace = session(SessionConfig(num_blocks=20, block_size=4), *requests).run_to_end()
    hits = {str(f.event.request_id): f.event.num_hit_tokens for f in events(trace, PrefixLookup)}  # type: ignore[attr-defined]
    assert hits == {"A": 0, "B": 0, "C": 8, "D": 0}


def test_the_scenario_can_evict_blocks() -> None:
    """R1.13: hashes go, references and the queue stay."""
    actions = (ActionSpec(2, "evict_blocks", block_ids=(1,)),)
    trace = session(SessionConfig(num_blocks=9, block_size=4), request("A", 8, 3), actions=actions).run_to_end()
    (evicted,) = events(trace, BlockEvicted)
    assert (evicted.event.block_id, evicted.event.cause.facts) == (1, {"what": "evict"})  # type: ignore[attr-defined]
    assert evicted.blocks[1].ref_cnt == 1


def test_the_scenario_can_lay_out_the_free_queue() -> None:
    actions = (ActionSpec(2, "arrange_free_queue", block_ids=(2, 5, 4, 3, 1)),)
    trace = session(SessionConfig(num_blocks=6, block_size=4), request("A", 8), request("B", 4, base=50, arrival_step=2), actions=actions).run_to_end()
    arranged = next(f for f in events(trace, BlocksFreed) if f.op == "arrange_free_queue")
    assert list(arranged.free_queue) == [2, 5, 4, 3, 1]
    assert [b.block_id for b in arranged.blocks if b.block_hashes] == [1, 2]
    assert {b.ref_cnt for b in arranged.blocks} == {0}


def test_an_order_of_other_blocks_ends_the_run_in_a_sentence() -> None:
    actions = (ActionSpec(2, "arrange_free_queue", block_ids=(1, 2)),)
    made = session(SessionConfig(num_blocks=6, block_size=4), request("A", 8, 3), actions=actions)
    last = made.run_to_end().frames[-1].event
    assert isinstance(made.error, EngineError)
    assert isinstance(last, EngineFailed)
    assert last.message == "arrange_free_queue names the blocks [1, 2], but those in the free queue are [3, 4, 5]; name each of them once"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kv_cache_groups": (FULL, SWA), "hash_block_size": 3}, "3"),
        ({"kv_cache_groups": (FULL, SWA), "retention_interval": 3}, "retention_interval is 3"),
        ({"compat": "0.26.0"}, "compat is '0.26.0'"),
        ({"hash_algo": "md5"}, "md5"),
        ({"decode_context_parallel_size": 2, "kv_cache_groups": (SWA,)}, "sliding"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(config: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        session(SessionConfig(num_blocks=40, block_size=4, **config), request("A", 7))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{"kv_cache_groups": (FULL, SWA)}, {"kv_cache_groups": (SWA,)}, {"decode_context_parallel_size": 2}])
def test_a_real_model_has_its_own_groups(config: dict[str, object]) -> None:
    settings = SessionConfig(num_blocks=40, block_size=4, **config)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^the KV-cache groups of tiny come from its layers; leave kv_cache_groups and ranks out"):
        Session(settings, (request("A", 7),), vocabulary=str, model_name="tiny")
