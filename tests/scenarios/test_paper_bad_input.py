"""Every way a scenario of the paper's engine can be wrong gives ``file:line: field.path: what, and how to mend it``."""

from __future__ import annotations

from functools import partial

import pytest

from scenarios import open_session, parse_scenario
from scenarios.problems import ScenarioError
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.refusals import assert_refused, replaced

GOOD = """\
id: scene
title: A title
source: somewhere
goal: See something.
engine: paper
model: none
config: {num_blocks: 9, block_size: 4}
prefixes:
  - id: P
    prompt: Four score
requests:
  - id: A
    prompt: Four score and seven years ago our
    n: 2
    max_tokens: 2
    force_samples: [[fathers, brought], [brought, forth]]
  - id: B
    prompt: on this
    beam_width: 2
    max_tokens: 2
    force_beams:
      - [{parent: 0, token: fathers}, {parent: 0, token: our}]
      - [{parent: 0, token: brought}, {parent: 1, token: forth}]
  - id: C
    prompt: on this
    prefix: P
    force: [fathers]
expect:
  - at: {kind: token_sampled, request: A2}
    block_table: {A1: [2, 3]}
"""

edited = partial(replaced, GOOD)


def in_a(field: str) -> str:
    return edited("    n: 2\n", f"    n: 2\n    {field}\n")


def config(more: str) -> str:
    return edited("block_size: 4", f"block_size: 4, {more}")


def fact(text: str) -> str:
    return edited("block_table: {A1: [2, 3]}", text)


V1 = GOOD.replace("engine: paper\n", "")
CASES: list[tuple[str, str, list[str]]] = [
    # what V1 does not know
    ("paper's fields under V1", V1, [
        "s.yaml:7: prefixes: “prefixes” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:13: requests[0].n: “n” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:15: requests[0].force_samples: “force_samples” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:18: requests[1].beam_width: “beam_width” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:20: requests[1].force_beams: “force_beams” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:25: requests[2].prefix: “prefix” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:28: expect[0].at.request: there is no request “A2”; did you mean “A”?",
        "s.yaml:29: expect[0].block_table.A1: there is no request “A1”; did you mean “A”?"]),
    ("swap space under V1", V1.split("prefixes:")[0].replace("4}", "4, num_cpu_blocks: 2, preemption_mode: swap}") + """\
requests: [{id: A, prompt: Four, force: [score], length_penalty: 2.0}]
expect: [{at: end, swapped: [], parents: {A: null}}]
""", [
        "s.yaml:6: config.num_cpu_blocks: “num_cpu_blocks” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:6: config.preemption_mode: “preemption_mode” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:7: requests[0].length_penalty: “length_penalty” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:8: expect[0].swapped: “swapped” belongs to the paper's engine; leave it out, or set “engine” to paper",
        "s.yaml:8: expect[0].parents: “parents” belongs to the paper's engine; leave it out, or set “engine” to paper"]),
    # what the paper's engine does not know
    *((f"{more.split(':')[0]} under the paper's engine", config(more), [
        f"s.yaml:7: config.{more.split(':')[0]}: “{more.split(':')[0]}” belongs to vLLM V1; leave it out, or set “engine” to v1"])
      for more in ("enable_prefix_caching: false", "enable_prefix_caching: true", "prefix_caching_hash_algo: sha256", "long_prefill_token_threshold: 2",
                   "scheduler_reserve_full_isl: false", "policy: priority", "kv_cache_groups: [{}]", "retention_interval: 8",
                   "use_eagle: true", "async_scheduling: true", 'compat: "0.27.0"')),
    ("hash sizes under the paper's engine", config("hash_block_size: 4, scheduler_block_size: 4, prefix_match_unit: 4"), [
        "s.yaml:7: config.hash_block_size: “hash_block_size” belongs to vLLM V1",
        "s.yaml:7: config.scheduler_block_size: “scheduler_block_size” belongs to vLLM V1",
        "s.yaml:7: config.prefix_match_unit: “prefix_match_unit” belongs to vLLM V1"]),
    ("ranks under the paper's engine", config("decode_context_parallel_size: 2, dcp_rank: 1, cp_kv_cache_interleave_size: 2"), [
        "s.yaml:7: config.decode_context_parallel_size: “decode_context_parallel_size” belongs to vLLM V1",
        "s.yaml:7: config.dcp_rank: “dcp_rank” belongs to vLLM V1",
        "s.yaml:7: config.cp_kv_cache_interleave_size: “cp_kv_cache_interleave_size” belongs to vLLM V1"]),
    *((f"{more.split(':')[0]} under the paper's engine", in_a(more), [
        f"s.yaml:15: requests[0].{more.split(':')[0]}: “{more.split(':')[0]}” belongs to vLLM V1; leave it out, or set “engine” to v1"])
      for more in ("cache_salt: x", "lora_name: x", "lora_int_id: 2", "mm_features: [{identifier: cat, offset: 0, length: 2}]")),
    ("actions on a prefix cache", GOOD + "actions:\n  - {at_step: 2, do: reset_prefix_cache}\n  - {at_step: 2, do: evict_blocks, block_ids: [0]}\n", [
        "s.yaml:32: actions[0].do: “reset_prefix_cache” belongs to vLLM V1; leave it out, or set “engine” to v1",
        "s.yaml:33: actions[1].do: “evict_blocks” belongs to vLLM V1; leave it out, or set “engine” to v1"]),
    ("facts about hashes", fact("hash_names: {1: []}"), ["s.yaml:30: expect[0].hash_names: “hash_names” belongs to vLLM V1"]),
    # blocks: there is no null block
    ("block beyond the pool in the order", config("free_queue_order: [0, 9]"), [
        "s.yaml:7: config.free_queue_order[1]: there is no block 9; the pool has the blocks 0 to 8"]),
    ("block twice in the order", config("free_queue_order: [0, 0]"), ["s.yaml:7: config.free_queue_order[1]: block 0 stands in the list twice"]),
    ("negative swap space", config("num_cpu_blocks: -1"), ["s.yaml:7: config.num_cpu_blocks: this is -1, but it must be at least 0; give a larger number"]),
    ("unknown way to preempt", config("preemption_mode: evict"), ["s.yaml:7: config.preemption_mode: the text “evict” is not one of the choices; "]),
    ("block of a swap space that is not there", fact("cpu_ref_cnt: {0: 1}"), [
        "s.yaml:30: expect[0].cpu_ref_cnt[0]: there is no block 0 in the swap space; num_cpu_blocks is 0, so there is none"]),
    ("block beyond the swap space", config("num_cpu_blocks: 2").replace("block_table: {A1: [2, 3]}", "cpu_block_table: {A1: [1, 2]}"), [
        "s.yaml:30: expect[0].cpu_block_table.A1: there is no block 2 in the swap space; it has the blocks 0 to 1"]),
    # samples
    ("too many samples", edited("n: 2", "n: 17"), ["s.yaml:14: requests[0].n: this is 17, but it may be at most 16; give a smaller number"]),
    ("more samples than sequences may run", config("max_num_seqs: 1"), [
        "s.yaml:14: requests[0].n: this is 2, but max_num_seqs is 1, and they run together; raise it or give a smaller number",
        "s.yaml:19: requests[1].beam_width: this is 2, but max_num_seqs is 1, and they run together; raise it or give a smaller number"]),
    ("more samples than tokens in an iteration", config("max_num_batched_tokens: 1"), [
        "s.yaml:14: requests[0].n: this is 2, but max_num_batched_tokens is 1, and each computes a token; raise it or give a smaller number",
        "s.yaml:19: requests[1].beam_width: this is 2, but max_num_batched_tokens is 1, and each computes a token; raise it or give a smaller number"]),
    ("more samples than are wanted", edited("n: 2", "n: 1"), [
        "s.yaml:16: requests[0].force_samples: 2 samples are forced, but n is 1; raise it or force fewer",
        "s.yaml:29: expect[0].at.request: there is no request or sequence “A2”; did you mean “A”?",
        "s.yaml:30: expect[0].block_table.A1: there is no request or sequence “A1”; did you mean “A”?"]),
    ("more outputs than max_tokens", edited("[brought, forth]]", "[brought, forth, on]]"), [
        "s.yaml:16: requests[0].force_samples[1]: 3 outputs are forced, but max_tokens is 2; raise it or force fewer"]),
    ("a sample that nothing decides", edited("[[fathers, brought], [brought, forth]]", "[[fathers, brought], [brought]]"), [
        "s.yaml:16: requests[0].force_samples[1]: without a model every output must be forced: 1 of 2 are for sample 2; force the rest"]),
    ("a sample that is missing", edited("[[fathers, brought], [brought, forth]]", "[[fathers, brought]]"), [
        "s.yaml:16: requests[0].force_samples: without a model every output must be forced: 0 of 2 are for sample 2; force the rest"]),
    ("samples forced as one", edited("force_samples: [[fathers, brought], [brought, forth]]", "force: [fathers, brought]"), [
        "s.yaml:16: requests[0].force: this request has several sequences; dictate them with “force_samples”"]),
    ("two ways to force", in_a("force: [fathers, brought]"), [
        "s.yaml:17: requests[0].force_samples: this request has force and force_samples; keep one of them"]),
    ("length penalty without beams", in_a("length_penalty: 2.0"), [
        "s.yaml:15: requests[0].length_penalty: a length penalty ranks finished beams; add “beam_width”, or leave it out"]),
    # beams
    *((f"beam width {width}", edited("beam_width: 2", f"beam_width: {width}"), [f"s.yaml:19: requests[1].beam_width: this is {width}, but it {rest}"])
      for width, rest in ((0, "must be at least 2; give a larger number"), (1, "must be at least 2; give a larger number"),
                          (9, "may be at most 8; give a smaller number"))),
    ("beams that are drawn", edited("beam_width: 2", "beam_width: 2\n    temperature: 0.5"), [
        "s.yaml:20: requests[1].temperature: beam search takes the most probable candidates and draws nothing; leave “temperature” out"]),
    ("more outputs than beams", edited("beam_width: 2", "beam_width: 2\n    n: 3"), [
        "s.yaml:20: requests[1].n: this is 3, but a beam search of width 2 cannot return more than 2; lower it or raise beam_width"]),
    ("survivors without a beam search", edited("    beam_width: 2\n", ""), [
        "s.yaml:20: requests[1].force_beams: this request searches no beams; add “beam_width”, or dictate its outputs with “force”"]),
    ("too many survivors", edited("{parent: 0, token: our}]", "{parent: 0, token: our}, {parent: 0, token: ago}]"), [
        "s.yaml:22: requests[1].force_beams[0]: 3 survivors are named, but beam_width is 2; name 1 to 2"]),
    ("no survivor", edited("[{parent: 0, token: fathers}, {parent: 0, token: our}]", "[]"), [
        "s.yaml:22: requests[1].force_beams[0]: 0 survivors are named, but beam_width is 2; name 1 to 2",
        "s.yaml:23: requests[1].force_beams[1][1].parent: there is no living beam 1; only beam 0, the prompt, can be followed here"]),
    ("a parent that the prompt is not", edited("{parent: 0, token: our}", "{parent: 1, token: our}"), [
        "s.yaml:22: requests[1].force_beams[0][1].parent: there is no living beam 1; only beam 0, the prompt, can be followed here"]),
    ("a parent that does not live", edited("{parent: 1, token: forth}", "{parent: 2, token: forth}"), [
        "s.yaml:23: requests[1].force_beams[1][1].parent: there is no living beam 2; the beams 0 to 1 can be followed here"]),
    ("the same survivor twice", edited("{parent: 0, token: our}", "{parent: 0, token: fathers}"), [
        "s.yaml:22: requests[1].force_beams[0][1]: the same token after the same parent is named twice; a beam can go on with it only once"]),
    ("more selections than max_tokens", edited("""beam_width: 2
    max_tokens: 2""", """beam_width: 2
    max_tokens: 1"""), [
        "s.yaml:21: requests[1].force_beams: 2 iterations are forced, but max_tokens is 1; raise it or force fewer"]),
    ("selections that nothing decides", edited("""beam_width: 2
    max_tokens: 2""", """beam_width: 2
    max_tokens: 3"""), [
        "s.yaml:21: requests[1].force_beams: without a model every output must be forced: the survivors of 2 of 3 iterations are; name the rest"]),
    ("a survivor without a parent", edited("{parent: 0, token: fathers}, {", "{token: fathers}, {"), [
        "s.yaml:22: requests[1].force_beams[0][0].parent: this field is missing; add it"]),
    ("a survivor with a score", edited("{parent: 0, token: fathers}, {", "{parent: 0, token: fathers, score: 1}, {"), [
        "s.yaml:22: requests[1].force_beams[0][0].score: there is no such field here; choose one of parent, token"]),
    # prefixes and names
    ("unknown prefix", edited("prefix: P", "prefix: Q"), ["s.yaml:26: requests[2].prefix: there is no prefix “Q”; choose one of P"]),
    ("a prefix where there are none", edited("prefixes:\n  - id: P\n    prompt: Four score\n", ""), [
        "s.yaml:23: requests[2].prefix: there is no prefix “P”; describe it under “prefixes”"]),
    ("a prefix without a prompt", edited("  - id: P\n    prompt: Four score\n", "  - id: P\n"), [
        "s.yaml:9: prefixes[0]: this prefix has no prompt; give it a “prompt” (a text) or “prompt_token_ids” (a list of numbers)"]),
    ("a prefix with two prompts", edited("prompt: Four score\n", "prompt: Four score\n    prompt_token_ids: [1]\n"), [
        "s.yaml:9: prefixes[0]: this prefix has a prompt and prompt_token_ids; keep one of them"]),
    ("a prefix with outputs", edited("prompt: Four score\n", "prompt: Four score\n    max_tokens: 1\n"), [
        "s.yaml:11: prefixes[0].max_tokens: there is no such field here; did you mean “prompt_token_ids”?"]),
    ("a prefix called like a request", edited("id: P", "id: C").replace("prefix: P", "prefix: C"), [
        "s.yaml:9: prefixes[0].id: the id “C” is used twice, first by requests[2]; give each prefix its own"]),
    ("a request called like a sample", edited("id: C", "id: A2"), [
        "s.yaml:24: requests[2].id: “A2” is what a sequence of request A is called; give it another id"]),
    ("a prefix called like a beam", edited("id: P", "id: B17").replace("prefix: P", "prefix: B17"), [
        "s.yaml:9: prefixes[0].id: “B17” is what a sequence of request B is called; give it another id"]),
    ("a group where a sequence is meant", fact("block_table: {A: [2]}"), [
        "s.yaml:30: expect[0].block_table.A: request A has several sequences; name one of them, as in A1"]),
    ("a sequence that is never born", fact("status: {A3: RUNNING}"), [
        "s.yaml:30: expect[0].status.A3: there is no request or sequence “A3”; did you mean “A”?"]),
    ("a sequence where a request is meant", fact("waiting: [A1]"), [
        "s.yaml:30: expect[0].waiting[0]: A1 is a sequence, and whole requests stand here; write A"]),
    ("an unknown parent", fact("parents: {A2: Z}"), ["s.yaml:30: expect[0].parents.A2: there is no request or sequence “Z”"]),
    ("a status of V1", fact("status: {A1: FINISHED_ERROR}"), ["s.yaml:30: expect[0].status.A1: there is no status “FINISHED_ERROR”; "]),
    ("an abort of a prefix", GOOD + "actions: [{at_step: 2, do: abort, request: P}]\n", [
        "s.yaml:31: actions[0].request: P is a prefix, which its provider keeps; abort a request that begins with it"]),
    ("an abort before the arrival", edited("id: C", "id: C\n    arrives_at_step: 5") + "actions: [{at_step: 4, do: abort, request: C}]\n", [
        "s.yaml:32: actions[0].at_step: this is 4, but C arrives at step 5; give 5 or more"]),
    ("an abort of a sequence", GOOD + "actions: [{at_step: 2, do: abort, request: A1}]\n", [
        "s.yaml:31: actions[0].request: A1 is a sequence, and whole requests stand here; write A"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_bad_scenario_names_line_field_and_remedy(text: str, expected: list[str]) -> None:
    assert_refused(text, expected)


def test_the_good_scenario_is_good(words: WordTokenizer) -> None:
    session = open_session(parse_scenario(GOOD, "s.yaml"))
    assert session.run_to_end().complete


def test_settings_that_say_what_goes_without_saying_do_no_harm(words: WordTokenizer) -> None:
    assert open_session(parse_scenario(config("policy: fcfs, async_scheduling: false"), "s.yaml")).run_to_end().complete
    plain = "id: s\ntitle: t\nsource: s\ngoal: g\nmodel: none\nconfig: {num_blocks: 9, block_size: 4, num_cpu_blocks: 0}\n"
    assert open_session(parse_scenario(plain + "requests: [{id: A, prompt: Four, force: [score], n: 1}]\n", "s.yaml")).run_to_end().complete


RESOLVED: list[tuple[str, str, list[str]]] = [
    ("prompt longer than an iteration", config("max_num_batched_tokens: 6"), [
        "s.yaml:13: requests[0].prompt: a prompt is computed in one piece, and this one has 7 tokens, but max_num_batched_tokens is 6; "
        "shorten it or raise max_num_batched_tokens to 7 or more"]),
    ("prefix longer than an iteration", edited("prompt: Four score\n", "prompt: Four score and seven years ago our fathers\n")
     .replace("block_size: 4", "block_size: 4, max_num_batched_tokens: 7"), [
        "s.yaml:10: prefixes[0].prompt: a prefix is computed in one piece, and this one has 8 tokens, but max_num_batched_tokens is 7; "
        "shorten it or raise max_num_batched_tokens to 8 or more"]),
    ("prompt longer than the pool", edited("num_blocks: 9", "num_blocks: 2"), [
        "s.yaml:13: requests[0].prompt: a prompt of 7 tokens needs 2 blocks of 4, but the pool has 1 block besides the 1 that prefixes keep; "
        "shorten it or set num_blocks to 3 or more"]),
    ("samples longer than the pool", edited("num_blocks: 9", "num_blocks: 3"), [
        "s.yaml:15: requests[0].max_tokens: 7 prompt tokens and 2 outputs of each of 2 samples need 3 blocks of 4, but the pool has 2 blocks besides the 1 "
        "that prefixes keep; lower max_tokens or set num_blocks to 4 or more"]),
    ("prefix longer than the pool", edited("prompt: Four score\n", "prompt: Four score and seven years ago our fathers on\n")
     .replace("num_blocks: 9", "num_blocks: 2"), [
        "s.yaml:10: prefixes[0].prompt: a prefix of 9 tokens needs 3 blocks of 4 for ever, but the pool has 2 blocks, and requests need some too; "
        "shorten it or set num_blocks to more than 3"]),
    ("prefixes longer than the pool together", edited("prompt: Four score\n", "prompt: Four score\n  - id: Q\n    prompt: seven years\n")
     .replace("num_blocks: 9", "num_blocks: 2"), [
        "s.yaml:12: prefixes[1].prompt: a prefix of 2 tokens needs 1 block of 4 for ever, but the pool has 1 block besides the 1 that prefixes keep, and "
        "requests need some too; shorten it or set num_blocks to more than 2"]),
    ("prompt as long as the model allows", config("max_model_len: 7"), [
        "s.yaml:13: requests[0].prompt: the prompt has 7 tokens, but with max_model_len 7 at most 6 can be followed by an output; shorten it or raise"]),
    ("forced texts of two tokens", edited("[fathers, brought], [", "[fathers brought, brought], [").replace("token: our}", "token: our on}"), [
        "s.yaml:16: requests[0].force_samples[0][0]: the text “fathers brought” is 2 tokens of none (“fathers”, “brought”) and must be exactly 1; force them",
        "s.yaml:22: requests[1].force_beams[0][1].token: the text “our on” is 2 tokens of none (“our”, “on”) and must be exactly 1; force them one by one"]),
    ("forced ids outside the vocabulary", edited("[fathers, brought], [", "[99999, brought], [").replace("token: our}", "token: 99998}"), [
        "s.yaml:16: requests[0].force_samples[0][0]: there is no token 99999; the vocabulary of none goes from 0 to 9999",
        "s.yaml:22: requests[1].force_beams[0][1].token: there is no token 99998; the vocabulary of none goes from 0 to 9999"]),
    ("a survivor of a beam that has ended", edited("token: our}", "token: 0}"), [
        "s.yaml:23: requests[1].force_beams[1][1].parent: there is no living beam 1: only 1 beam goes on, the others ended with a stop token; count those"]),
    ("survivors of nobody", edited("[{parent: 0, token: fathers}, {parent: 0, token: our}]", "[{parent: 0, token: 0}]")
     .replace("parent: 1, token", "parent: 0, token"), [
        "s.yaml:23: requests[1].force_beams[1]: all beams have ended with a stop token, so nothing can follow; leave this selection out, or set ignore_eos"]),
    ("the same survivor by text and by id", edited("{parent: 0, token: our}", "{parent: 0, token: 8}"), [
        "s.yaml:22: requests[1].force_beams[0][1]: the same token after the same parent is named twice; a beam can go on with it only once"]),
    ("prefix without a token", edited("prompt: Four score\n", "prompt: ' '\n"), [
        "s.yaml:10: prefixes[0].prompt: this text has no token for none; write at least one word"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in RESOLVED], ids=[c[0] for c in RESOLVED])
def test_what_the_model_or_the_pool_cannot_serve_is_refused(words: WordTokenizer, text: str, expected: list[str]) -> None:
    assert_refused(text.replace("block_table: {A1: [2, 3]}", "running: []"), expected, opens=True)


def test_beams_need_a_vocabulary_that_is_as_wide(words: WordTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WordTokenizer, "vocab_size", 1)
    scenario = parse_scenario(GOOD.split("  - id: A\n")[0].replace("prefixes:\n  - id: P\n    prompt: Four score\n", "") + """\
  - id: B
    prompt: <eos>
    beam_width: 2
    force_beams: [[{parent: 0, token: 0}]]
""", "s.yaml")  # fmt: skip
    with pytest.raises(ScenarioError, match=r"^s\.yaml:11: requests\[0\]\.beam_width: this is 2, but the vocabulary of none has 1 tokens to go on with; give"):
        open_session(scenario)
