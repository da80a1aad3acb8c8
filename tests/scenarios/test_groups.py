"""Scenarios with several KV-cache groups: what may be written, what is refused, and what can be expected of each group."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidInput
from engine.model_groups import with_groups_of_model
from engine.trace.events import BlockCached, BlocksAllocated, Cause, CauseKind, GroupLookup, PrefixLookup, SlotsMapped
from engine.trace.frame import BlockState, Counters, Frame, RequestState, Trace, TraceHeader
from scenarios import ScenarioError, for_model, parse_scenario, run, scenario_from_data
from scenarios.expectations import check_expectations, select, selector_text
from scenarios.final_state import final_state
from scenarios.resolve import session_config
from scenarios.schema import Selector
from scenarios.walk import frame_line
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.refusals import assert_complains, replaced

CAUSE = Cause(CauseKind.SCENARIO)
GOOD = """\
id: scene
title: A title
source: somewhere
goal: See something.
model: none
config:
  num_blocks: 24
  block_size: 4
  kv_cache_groups:
    - {type: full, block_size: 8}
    - {type: sliding_window, sliding_window: 8}
requests:
  - {id: A, prompt_token_ids: [0, 1, 2, 3, 4], force: [100]}
actions:
  - {at_step: 2, do: evict_blocks, block_ids: [3]}
expect:
  - at: {kind: blocks_allocated, group: 1}
    block_table: {A: [3, 4]}
  - at: end
    block_table: {A: [[], []]}
"""

edited = partial(replaced, GOOD)

SWA = "{type: sliding_window, sliding_window: 8}"
CASES: list[tuple[str, str, str]] = [
    ("unknown type", edited(SWA, "{type: swa}"), "s.yaml:11: config.kv_cache_groups[1].type: the text “swa” is not one of the choices; "),
    ("unknown field", edited(SWA, "{type: sliding_window, window: 8}"), "s.yaml:11: config.kv_cache_groups[1].window: there is no such field here; "),
    ("no window", edited(SWA, "{type: sliding_window}"),
     "s.yaml:11: config.kv_cache_groups[1]: a group of the type “sliding_window” needs sliding_window; add it"),
    ("window of none", edited(SWA, "{type: sliding_window, sliding_window: 0}"),
     "s.yaml:11: config.kv_cache_groups[1].sliding_window: this is 0, but it must be at least 1; give a larger number"),
    ("window as a text", edited(SWA, "{type: sliding_window, sliding_window: '8'}"),
     "s.yaml:11: config.kv_cache_groups[1].sliding_window: this must be a whole number, not the text “8”; take the quotes away"),
    ("window of full attention", edited(SWA, "{type: full, sliding_window: 8}"),
     "s.yaml:11: config.kv_cache_groups[1].sliding_window: a group of the type “full” has no sliding_window; leave it out, or take the type sliding_window"),
    ("mamba without a mode", edited(SWA, "{type: mamba}"),
     "s.yaml:11: config.kv_cache_groups[1]: a group of the type “mamba” needs mamba_cache_mode; add it"),
    ("unknown mode", edited(SWA, "{type: mamba, mamba_cache_mode: some}"),
     "s.yaml:11: config.kv_cache_groups[1].mamba_cache_mode: the text “some” is not one of the choices; "),
    ("groups as one group", edited("    - {type: full, block_size: 8}\n    - " + SWA, "    " + SWA),
     "s.yaml:9: config.kv_cache_groups: this must be a list, not a group of fields; write it in brackets"),
    ("sizes that do not divide", edited("  block_size: 4\n", "  block_size: 4\n  prefix_match_unit: 3\n"),
     "s.yaml:9: config.prefix_match_unit: this is 3, but a block of 8 tokens is no multiple of it; give a number that divides every group's block size"),
    ("hashes coarser than blocks", edited("  block_size: 4\n", "  block_size: 4\n  hash_block_size: 8\n"),
     "s.yaml:9: config.hash_block_size: this is 8, but a block of 4 tokens is no multiple of it; "),
    ("hits inside blocks", edited("  block_size: 4\n", "  block_size: 4\n  scheduler_block_size: 4\n"),
     "s.yaml:9: config.scheduler_block_size: this is 4, but it must be a multiple of every group's block size, and 8 is one; correct it"),
    ("rank that is not there", edited("  block_size: 4\n", "  block_size: 4\n  decode_context_parallel_size: 2\n  dcp_rank: 2\n"),
     "s.yaml:10: config.dcp_rank: there is no rank 2; with decode_context_parallel_size 2 the ranks are 0 to 1"),
    ("turns that do not fit", edited("  block_size: 4\n", "  block_size: 4\n  cp_kv_cache_interleave_size: 3\n"),
     "s.yaml:9: config.cp_kv_cache_interleave_size: this is 3, but it must divide block_size 4, so that a block has whole turns"),
    ("groups on a model", edited("model: none", "model: tiny"),
     "s.yaml:9: config.kv_cache_groups: the groups of tiny come from its layers; leave this out, or set “model” to none"),
    ("unknown group", edited("group: 1}", "group: 2}"), "s.yaml:17: expect[0].at.group: there is no group 2; the groups are 0 to 1"),
    ("one table for two groups", edited("{A: [[], []]}", "{A: [1]}"),
     "s.yaml:20: expect[1].block_table.A: there are 2 groups; write the table as in [[1], [2]]"),
    ("three tables for two groups", edited("{A: [[], []]}", "{A: [[], [], [1]]}"),
     "s.yaml:20: expect[1].block_table.A: there are 2 groups, but 3 lists; write one list per group, [] for an empty table"),
    ("two tables for a named group", edited("{A: [3, 4]}", "{A: [[1], [3, 4]]}"),
     "s.yaml:18: expect[0].block_table.A: “at” names group 1, so this is one list"),
    ("text in a table", edited("{A: [3, 4]}", "{A: [3, four]}"), "s.yaml:18: expect[0].block_table.A: a block table is a list of block ids, as in [7, 1], or "),
    ("block that is not there", edited("{A: [3, 4]}", "{A: [3, 24]}"),
     "s.yaml:18: expect[0].block_table.A: there is no block 24; the pool has the blocks 0 to 23"),
    ("eviction of nothing", edited("block_ids: [3]}", "block_ids: []}"),
     "s.yaml:15: actions[0]: it is not said which blocks lose their hashes; add “block_ids”"),
    ("eviction of a request", edited("block_ids: [3]}", "block_ids: [3], request: A}"),
     "s.yaml:15: actions[0].request: evict_blocks concerns no single request; "),
    ("blocks for a reset", edited("do: evict_blocks", "do: reset_prefix_cache"),
     "s.yaml:15: actions[0].block_ids: reset_prefix_cache concerns no single blocks; "),
    ("eviction of a block that is not there", edited("block_ids: [3]}", "block_ids: [99]}"), "s.yaml:15: actions[0].block_ids: there is no block 99; "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "start"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_wrong_is_said_with_its_place(text: str, start: str) -> None:
    assert_complains(text, start)


ON_TINY_SWA = """\
id: scene
title: A title
source: somewhere
goal: See something.
model: tiny-swa
config:
  num_blocks: 24
  block_size: 4
  sliding_window: 4
requests:
  - {id: A, prompt: "Four score and seven", max_tokens: 2}
expect:
  - at: {kind: blocks_allocated, group: 2}
    block_table: {A: [3]}
  - at: {kind: request_scheduled, nth: 2}
    block_table: {A: [[1, 4], [2, 5], [3, 6]]}
"""

on_tiny_swa = partial(replaced, ON_TINY_SWA)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (on_tiny_swa("model: tiny-swa", "model: tiny"),
         "s.yaml:9: config.sliding_window: every layer of tiny sees all tokens; leave this out, or take the model tiny-swa"),
        (on_tiny_swa("model: tiny-swa", "model: none"),
         "s.yaml:9: config.sliding_window: without a model there is no window to replace; name a group with this window in “kv_cache_groups”"),
        (on_tiny_swa("window: 4", "window: 0"), "s.yaml:9: config.sliding_window: this is 0, but it must be at least 1; give a larger number"),
        (on_tiny_swa("model: tiny-swa", "model: tiny-swa\nengine: paper"), "s.yaml:10: config.sliding_window: “sliding_window” belongs to vLLM V1; "),
        (on_tiny_swa("group: 2", "group: 3"), "s.yaml:13: expect[0].at.group: there is no group 3; the groups are 0 to 2"),
        (on_tiny_swa("[[1, 4], [2, 5], [3, 6]]", "[1, 4]"), "s.yaml:16: expect[1].block_table.A: there are 3 groups; write the table as in [[1], [2], [3]]"),
        (on_tiny_swa("  sliding_window: 4\n", "  kv_cache_groups: [{type: full}]\n"),
         "s.yaml:9: config.kv_cache_groups: the groups of tiny-swa come from its layers; leave this out, or set “model” to none"),
        (on_tiny_swa("sliding_window: 4", "prefix_match_unit: 3"),
         "s.yaml:9: config.prefix_match_unit: this is 3, but a block of 4 tokens is no multiple of it; "),
    ],
)  # fmt: skip
def test_what_a_model_with_windows_cannot_have_is_said_with_its_place(text: str, start: str) -> None:
    assert_complains(text, start)


ON_TINY_HYBRID = """\
id: scene
title: A title
source: somewhere
goal: See something.
model: tiny-hybrid
config:
  num_blocks: 24
  block_size: 4
  mamba_cache_mode: align
requests:
  - {id: A, prompt: "Four score and seven", max_tokens: 2}
"""

on_tiny_hybrid = partial(replaced, ON_TINY_HYBRID)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (on_tiny_hybrid("model: tiny-hybrid", "model: tiny"),
         "s.yaml:9: config.mamba_cache_mode: this is align, but tiny has no Mamba layers; leave it out, or take the model tiny-hybrid"),
        (on_tiny_hybrid("model: tiny-hybrid", "model: none"),
         "s.yaml:9: config.mamba_cache_mode: without a model there are no Mamba layers to tell it; name a group with this mode in “kv_cache_groups”"),
        (on_tiny_hybrid("mode: align", "mode: some"),
         "s.yaml:9: config.mamba_cache_mode: the text “some” is not one of the choices; choose one of all, align, none"),
        (on_tiny_hybrid("mode: align", "mode: none"), "s.yaml:9: config.mamba_cache_mode: this is none, but with prefix caching some states must be kept; "
         "choose align or all, or turn enable_prefix_caching off"),
        (on_tiny_hybrid("mode: align", "mode: all\n  enable_prefix_caching: false"), "s.yaml:9: config.mamba_cache_mode: this is all, but without prefix "
         "caching no state is kept for other requests; leave it out, or turn enable_prefix_caching on"),
        (on_tiny_hybrid("block_size: 4", "block_size: 3"), "s.yaml:8: config.block_size: this is 3, but a block of tiny-hybrid must have room for a recurrent "
         "state, which takes as much as 4 tokens; give 4 or more"),
        (on_tiny_hybrid("mamba_cache_mode: align", "prefix_match_unit: 3"),
         "s.yaml:9: config.prefix_match_unit: this is 3, but a block of 4 tokens is no multiple of it; "),
        (on_tiny_hybrid("model: tiny-hybrid", "model: tiny-hybrid\nengine: paper"), "s.yaml:5: model: tiny-hybrid has layers with a recurrent state, which the "
         "paper's engine does not know; take tiny, or set “engine” to v1"),
        (on_tiny_hybrid("model: tiny-hybrid", "model: tiny-hybrid\nengine: paper"),
         "s.yaml:10: config.mamba_cache_mode: “mamba_cache_mode” belongs to vLLM V1; "),
        (on_tiny_hybrid("mamba_cache_mode: align", "retention_interval: 6"),
         "s.yaml:9: config.retention_interval: this is 6, but hits end on multiples of 4 tokens; give 0 or such a multiple"),
        (edited("    - {type: full, block_size: 8}\n    - {type: sliding_window, sliding_window: 8}",
                "    - {type: mamba, mamba_cache_mode: all}\n  decode_context_parallel_size: 2"),
         "s.yaml:11: config.decode_context_parallel_size: ranks deal out the tokens of attention, and no group has any; leave this out"),
        (edited(SWA, "{type: mamba, block_size: 4, mamba_cache_mode: none}"), "s.yaml:11: config.kv_cache_groups[1].mamba_cache_mode: this is none, but with "
         "prefix caching some states must be kept; choose align or all, or turn enable_prefix_caching off"),
    ],
)  # fmt: skip
def test_what_a_model_with_states_cannot_have_is_said_with_its_place(text: str, start: str) -> None:
    assert_complains(text, start)


def test_of_a_model_that_is_not_installed_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has read its config.json, so nobody knows whether it has Mamba layers."""
    monkeypatch.setenv("PAGEWALK_CACHE", str(tmp_path))
    scenario = parse_scenario(on_tiny_hybrid("model: tiny-hybrid", "model: gemma3-270m"), "s.yaml")
    with pytest.raises(
        ScenarioError, match=r"^s.yaml:5: model: The model gemma3-270m is not installed: get it with `python -m engine.models pull gemma3-270m`\.$"
    ):
        run(scenario)


def test_the_mode_of_a_models_states_and_finer_hashes_reach_the_session() -> None:
    """R2.6 with the groups of the model: hits end on blocks of 4, hashes are taken every 2 tokens."""
    scenario = parse_scenario(on_tiny_hybrid("mode: align", "mode: all\n  prefix_match_unit: 2"), "s.yaml")
    config = with_groups_of_model(session_config(scenario, None), "tiny-hybrid")
    assert config.mamba_cache_mode == "all"
    assert config.block_sizes() == (4, 2)


def test_a_model_with_windows_runs_in_its_groups_and_with_the_window_of_the_scenario() -> None:
    result = run(parse_scenario(ON_TINY_SWA, "s.yaml"))
    assert result.error is None
    assert result.failures == []
    assert [group.get("sliding_window") for group in result.trace.header.config["kv_cache_groups"]] == [4, 4, None]


def test_a_request_that_the_groups_of_the_model_cannot_hold_is_refused() -> None:
    """104 tokens are 26 blocks of full attention; the groups with windows let blocks go and are left to the engine."""
    scenario = parse_scenario(on_tiny_swa("max_tokens: 2", "max_tokens: 100"), "s.yaml")
    with pytest.raises(ScenarioError, match=r"4 prompt tokens and 100 outputs need 26 blocks of 4, but the pool has 23 usable blocks"):
        run(scenario)


def test_on_a_model_with_other_groups_nothing_is_claimed() -> None:
    scenario = parse_scenario(ON_TINY_SWA.replace("  sliding_window: 4\n", ""), "s.yaml")
    held = for_model(scenario, "tiny")
    assert (held.notes, held.corrections, held.expect) == ([], [], [])
    assert run(scenario, model="tiny").failures == []


def test_settings_reach_the_session() -> None:
    """R2.6: the hash block size is the greatest common divisor, hits end on the least common multiple."""
    config = session_config(parse_scenario(GOOD, "s.yaml"), None)
    assert [(g.type, g.block_size, g.sliding_window) for g in config.kv_cache_groups] == [("full", 8, None), ("sliding_window", None, 8)]
    assert config.block_sizes() == (8, 4)


def test_one_group_alone_may_not_be_written_as_several() -> None:
    text = edited("    - {type: full, block_size: 8}\n", "")
    with pytest.raises(ScenarioError, match=r"expect\[1\]\.block_table\.A: there is 1 group; write the table as in \[1, 2\]$"):
        parse_scenario(text, "s.yaml")


# ------------------------------------------------------------------ facts, on a trace made by hand
DIGESTS = ("aa" * 32, "bb" * 32)


def two_groups() -> Trace:
    """A full group with blocks of 4 and a window group with blocks of 2; request A of 5 tokens holds 1, 2 and 0, 3, 4."""

    def block(block_id: int, keys: tuple[str, ...] = (), state: int | None = None) -> BlockState:
        return BlockState(block_id, int(block_id > 0), block_id == 0, keys, 4 if keys else None, 0, (None,) * 4, (), num_state_tokens=state)

    blocks = (block(0), block(1, (f"{DIGESTS[1]}:0",)), block(2, (), 5), block(3, (f"{DIGESTS[1]}:1", f"{DIGESTS[0]}:1")), block(4))
    request = RequestState("A", "RUNNING", 5, (0, 1, 2, 3, 4), 5, ((1, 2), (0, 3, 4)), DIGESTS, (1, 2))
    hash_map = tuple((key, (b.block_id,)) for b in blocks for key in b.block_hashes)
    events = [
        BlocksAllocated(cause=CAUSE, request_id="A", group_id=0, block_ids=[1, 2]),
        BlocksAllocated(cause=CAUSE, request_id="A", group_id=1, block_ids=[3, 4]),
        BlockCached(cause=CAUSE, request_id="A", group_id=1, block_id=3, block_hash=DIGESTS[1], parent_hash=None, token_ids=[2, 3]),
        SlotsMapped(cause=CAUSE, request_id="A", group_id=1, positions=[4], slots=[8], token_ids=[4]),
        PrefixLookup(
            cause=CAUSE, request_id="A", num_hit_tokens=4, hit_block_ids=[1, 3], max_hit_tokens=4,
            groups=[GroupLookup(0, 4, [1], Cause(CauseKind.LAST_TOKEN_RULE)), GroupLookup(1, 4, [0, 3], Cause(CauseKind.LAST_TOKEN_RULE))],
        ),
    ]  # fmt: skip
    frames = [
        Frame(seq, 1, "schedule", 1, event, blocks, (), hash_map, (request,), ("A",), (), (), (), {}, Counters())  # type: ignore[arg-type]
        for seq, event in enumerate(events)
    ]
    groups = [{"kind": "full_attention", "block_size": 4, "page_size_bytes": 64}, {"kind": "sliding_window", "block_size": 2, "page_size_bytes": 32}]
    config = {"block_size": 4, "hash_block_size": 2, "kv_cache_groups": groups}
    return Trace(TraceHeader({}, config, {"name": "none"}, {}, {}, 0, {}), frames, complete=True)


def failures(at: Any, **facts: Any) -> list[str]:
    data = {**scenario_data(), "expect": [{"at": at, **facts}]}
    return [str(f) for f in check_expectations(scenario_from_data(data), two_groups(), WordTokenizer().decode)]


def scenario_data() -> dict[str, Any]:
    groups = [{"type": "full"}, {"type": "sliding_window", "sliding_window": 4, "block_size": 2}]
    return {
        "id": "s", "title": "t", "source": "s", "goal": "g", "model": "none", "config": {"num_blocks": 5, "block_size": 4, "kv_cache_groups": groups},
        "requests": [{"id": "A", "prompt_token_ids": [0, 1, 2, 3, 4], "force": [5]}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("at", "right", "wrong"),
    [
        ("end", {"block_table": {"A": [[1, 2], [0, 3, 4]]}}, {"block_table": {"A": [[1, 2], [3, 4]]}}),
        ({"kind": "blocks_allocated", "group": 1}, {"block_table": {"A": [0, 3, 4]}, "block_ids": [3, 4]}, {"block_table": {"A": [1, 2]}}),
        ("end", {"hash_names": {1: ["A@4/g0"], 3: ["A@4/g1", "A@2/g1"], 4: []}}, {"hash_names": {1: ["A@4"]}}),
        ("end", {"num_state_tokens": {2: 5, 1: None}}, {"num_state_tokens": {2: 4}}),
        ("end", {"num_cached_block": {"A": [1, 2]}}, {"num_cached_block": {"A": [1]}}),
        ("end", {"page_size_bytes": [64, 32]}, {"page_size_bytes": [64]}),
        ({"kind": "block_cached"}, {"slot": {2: 6, 3: 7, 4: 8}}, {"slot": {4: 4}}),
        ({"kind": "slots_mapped", "group": 1}, {"slot": {4: 8}}, {"slot": {4: 4}}),
    ],
)
def test_facts_of_each_group(at: Any, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    assert failures(at, **right) == []
    assert len(failures(at, **wrong)) == 1


def test_a_selector_can_name_a_group() -> None:
    trace = two_groups()
    frame = select(Selector(kind="blocks_allocated", group=1), trace.frames)
    assert frame is not None
    assert frame.seq == 1
    assert select(Selector(kind="blocks_allocated", group=1, nth=2), trace.frames) is None
    assert selector_text(Selector(kind="blocks_allocated", request="A", group=1, step=2)) == "1st blocks_allocated of A in group 1 in step 2"


def test_the_final_state_has_a_table_per_group_and_further_hashes() -> None:
    state = final_state(two_groups())
    assert state["requests"]["A"]["blocks"] == [[1, 2], [0, 3, 4]]
    assert state["hash"] == {"1": "A@4/g0", "3": "A@4/g1"}
    assert state["extra_hashes"] == {"3": ["A@2/g1"]}
    assert state["map"] == {"A@4/g0": 1, "A@4/g1": 3, "A@2/g1": 3}


def test_lines_name_the_group() -> None:
    trace = two_groups()
    assert "blocks_allocated    A    g1 block_ids=[3, 4]" in frame_line(trace.frames[1], trace)
    assert "groups=“g0 [1] last_token_rule, g1 [0, 3] last_token_rule”" in frame_line(trace.frames[4], trace)


def test_a_model_refuses_groups_in_one_sentence() -> None:
    """`--model` can put a scene on another model than its own; groups are not its to have."""
    from scenarios import open_session

    with pytest.raises(
        InvalidInput, match=r"^the KV-cache groups of tiny come from its layers; leave kv_cache_groups and ranks out, or set the model to “none”$"
    ):
        open_session(scenario_from_data(scenario_data()), model="tiny")


def test_the_papers_scenes_are_not_run_on_a_model_with_states() -> None:
    with pytest.raises(InvalidInput, match=r"^tiny-hybrid has layers with a recurrent state, which the paper's engine does not know; take tiny, or a scene of"):
        run("figure-6", model="tiny-hybrid")


def test_scenes_of_one_group_hold_their_requests_on_a_model_with_states() -> None:
    """Other groups fill other blocks, so that nothing of the scene is claimed; but it runs to its end."""
    result = run("same-prompt-twice", model="tiny-hybrid", interpreted_layers=())
    assert (result.error, result.failures) == (None, [])
    assert {request.status for request in result.trace.frames[-1].requests} <= {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"}
