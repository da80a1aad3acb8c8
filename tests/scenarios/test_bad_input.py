"""Every way a scenario can be wrong gives ``file:line: field.path: what, and how to mend it``, all of them at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from engine.errors import InvalidInput
from scenarios import load_scenario, open_session, parse_scenario
from scenarios.problems import ScenarioError
from tests.scenarios.conftest import WordTokenizer
from tests.scenarios.refusals import assert_refused, replaced

GOOD = """\
id: scene
title: A title
source: somewhere
goal: See something.
model: none
config: {num_blocks: 9, block_size: 4}
requests:
  - id: A
    prompt: Four score and seven years ago our
    force: [fathers, brought]
notes:
  - at: {kind: prefix_lookup, request: A}
    say: A sentence.
expect:
  - at: end
    free_queue: [3, 4, 5, 6, 7, 8, 2, 1]
"""

edited = partial(replaced, GOOD)

CASES: list[tuple[str, str, list[str]]] = [
    # unknown and missing fields
    ("unknown field", edited("goal: See", "gaol: See"), [
        "s.yaml:1: goal: this field is missing; add it",
        "s.yaml:4: gaol: there is no such field here; did you mean “goal”?"]),
    ("unknown field in config", edited("num_blocks: 9", "num_blocks: 9, token_budget: 8"), [
        "s.yaml:6: config.token_budget: there is no such field here; choose one of num_blocks, block_size, "]),
    ("misspelt field in config", edited("block_size: 4", "blocksize: 4"), [
        "s.yaml:6: config.block_size: this field is missing",
        "s.yaml:6: config.blocksize: there is no such field here; did you mean “block_size”?"]),
    ("unknown field in a selector", edited("request: A}", "reqest: A}"), [
        "s.yaml:12: notes[0].at.reqest: there is no such field here; did you mean “request”?"]),
    ("unknown fact", edited("free_queue: [3", "freequeue: [3"), [
        "s.yaml:16: expect[0].freequeue: there is no such field here; did you mean “free_queue”?"]),
    # wrong types
    ("text for a number", edited("num_blocks: 9", "num_blocks: nine"), [
        "s.yaml:6: config.num_blocks: this must be a whole number, not the text “nine”; correct it"]),
    ("number in quotes", edited("num_blocks: 9", "num_blocks: '9'"), [
        "s.yaml:6: config.num_blocks: this must be a whole number, not the text “9”; take the quotes away"]),
    ("fraction for a whole number", edited("block_size: 4", "block_size: 4.5"), [
        "s.yaml:6: config.block_size: this must be a whole number, not 4.5"]),
    ("number for a text", edited("title: A title", "title: 2023"), [
        "s.yaml:2: title: this must be a text, not 2023; put it in quotes"]),
    ("truth value for a number", edited("block_size: 4", "block_size: true"), [
        "s.yaml:6: config.block_size: this must be a whole number, not true"]),
    ("text for a truth value", edited("block_size: 4", "block_size: 4, enable_prefix_caching: yes"), [
        "s.yaml:6: config.enable_prefix_caching: this must be true or false, not the text “yes”; write true or false, without quotes"]),
    ("one value for a list", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "free_queue: 2"), [
        "s.yaml:16: expect[0].free_queue: this must be a list, not 2; write it in brackets"]),
    ("text for a group of fields", edited("config: {num_blocks: 9, block_size: 4}", "config: small"), [
        "s.yaml:6: config: this must be fields of its own, not the text “small”; write its fields indented below it"]),
    ("null for a field", edited("config: {num_blocks: 9, block_size: 4}", "config:"), [
        "s.yaml:6: config: this must be fields of its own, not nothing (null)"]),
    ("truth value as a forced token", edited("[fathers, brought]", "[fathers, true]"), [
        "s.yaml:10: requests[0].force[1]: a forced token is the text of one token or its id, but this is true"]),
    ("negative forced id", edited("[fathers, brought]", "[fathers, -3]"), [
        "s.yaml:10: requests[0].force[1]: a token id cannot be negative, but this is -3"]),
    ("text as a block id", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "ref_cnt: {first: 1}"), [
        "s.yaml:16: expect[0].ref_cnt.first: this must be a whole number, not the text “first”"]),
    # sizes
    ("no usable block", edited("num_blocks: 9", "num_blocks: 1"), [
        "s.yaml:6: config.num_blocks: this is 1, but it must be at least 2; give a larger number"]),
    ("block size zero", edited("block_size: 4", "block_size: 0"), [
        "s.yaml:6: config.block_size: this is 0, but it must be at least 1; give a larger number"]),
    ("negative block size", edited("block_size: 4", "block_size: -4"), [
        "s.yaml:6: config.block_size: this is -4, but it must be at least 1"]),
    ("giant pool", edited("num_blocks: 9", "num_blocks: 1000000000"), [
        "s.yaml:6: config.num_blocks: this is 1000000000, but it may be at most 8192; give a smaller number"]),
    ("budget zero", edited("block_size: 4", "block_size: 4, max_num_batched_tokens: 0"), [
        "s.yaml:6: config.max_num_batched_tokens: this is 0, but it must be at least 1"]),
    ("watermark of one", edited("block_size: 4", "block_size: 4, watermark: 1"), [
        "s.yaml:6: config.watermark: this is 1, but it must be less than 1; give a smaller number"]),
    ("max_tokens zero", edited("    force:", "    max_tokens: 0\n    force:"), [
        "s.yaml:10: requests[0].max_tokens: this is 0, but it must be at least 1"]),
    ("arrival at step 0", edited("    force:", "    arrives_at_step: 0\n    force:"), [
        "s.yaml:10: requests[0].arrives_at_step: this is 0, but it must be at least 1"]),
    ("infinite temperature", edited("    force:", "    temperature: 1e999\n    force:"), [
        "s.yaml:10: requests[0].temperature: "]),
    # names and choices
    ("no slug", edited("id: scene", "id: My Scene"), [
        "s.yaml:1: id: the text “My Scene” does not fit; use small letters and digits with single hyphens"]),
    ("unknown policy", edited("block_size: 4", "block_size: 4, policy: fifo"), [
        "s.yaml:6: config.policy: the text “fifo” is not one of the choices; "]),
    ("unknown action", GOOD + "actions: [{at_step: 2, do: reset}]\n", [
        "s.yaml:17: actions[0].do: the text “reset” is not one of the choices; "]),
    ("unknown question", GOOD + "questions: [{at: end, ask: next_block}]\n", [
        "s.yaml:17: questions[0].ask: the text “next_block” is not one of the choices; did you mean “next_free_block”?"]),
    ("empty title", edited("title: A title", "title: ''"), ["s.yaml:2: title: this is empty; put something in"]),
    ("no requests", GOOD.split("requests:")[0] + "requests: []\n", ["s.yaml:7: requests: this is empty; put something in"]),
    # prompts
    ("no prompt", edited("    prompt: Four score and seven years ago our\n", ""), [
        "s.yaml:8: requests[0]: this request has no prompt; give it a “prompt” (a text) or “prompt_token_ids” (a list of numbers)"]),
    ("empty prompt", edited("Four score and seven years ago our", "''"), ["s.yaml:9: requests[0].prompt: this is empty"]),
    ("empty token ids", edited("prompt: Four score and seven years ago our", "prompt_token_ids: []"), [
        "s.yaml:9: requests[0].prompt_token_ids: this is empty"]),
    ("two prompts", edited("    force:", "    prompt_token_ids: [1]\n    force:"), [
        "s.yaml:8: requests[0]: this request has a prompt and prompt_token_ids; keep one of them"]),
    ("same id twice", edited("notes:", "  - {id: A, prompt: Four, force: [score]}\nnotes:"), [
        "s.yaml:11: requests[1].id: the id “A” is used twice, first by requests[0]; give each request its own"]),
    ("more forced than max_tokens", edited("    force:", "    max_tokens: 1\n    force:"), [
        "s.yaml:11: requests[0].force: 2 outputs are forced, but max_tokens is 1; raise it or force fewer"]),
    ("not all forced without a model", edited("    force:", "    max_tokens: 3\n    force:"), [
        "s.yaml:11: requests[0].force: without a model every output must be forced: 2 of 3 are; force the rest or name a model"]),
    ("priority under fcfs", edited("    force:", "    priority: 1\n    force:"), [
        "s.yaml:10: requests[0].priority: a priority matters only under the policy “priority”"]),
    # the order of the free queue (rule S24)
    ("null block in the order", edited("block_size: 4", "block_size: 4, free_queue_order: [7, 0]"), [
        "s.yaml:6: config.free_queue_order[1]: block 0 is the null block and is never handed out; take it out"]),
    ("block beyond the pool in the order", edited("block_size: 4", "block_size: 4, free_queue_order: [9]"), [
        "s.yaml:6: config.free_queue_order[0]: there is no block 9; the pool has the blocks 1 to 8 besides the null block"]),
    ("block twice in the order", edited("block_size: 4", "block_size: 4, free_queue_order: [7, 1, 7]"), [
        "s.yaml:6: config.free_queue_order[2]: block 7 stands in the list twice"]),
    # selectors and facts
    ("unknown kind of event", edited("kind: prefix_lookup", "kind: prefix_lokup"), [
        "s.yaml:12: notes[0].at.kind: there is no event of the kind “prefix_lokup”; did you mean “prefix_lookup”?"]),
    ("unknown request in a selector", edited("request: A}", "request: B}"), [
        "s.yaml:12: notes[0].at.request: there is no request “B”; choose one of A"]),
    ("event number 0", edited("request: A}", "request: A, nth: 0}"), ["s.yaml:12: notes[0].at.nth: events are counted from 1"]),
    ("start of a request", edited("{kind: prefix_lookup, request: A}", "{kind: start, request: A}"), [
        "s.yaml:12: notes[0].at: “start” is a single frame; leave request, nth and step out"]),
    ("no facts", edited("    free_queue: [3, 4, 5, 6, 7, 8, 2, 1]\n", ""), ["s.yaml:15: expect[0]: nothing is expected here; add a fact"]),
    ("unknown request in a fact", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "block_table: {C: [1]}"), [
        "s.yaml:16: expect[0].block_table.C: there is no request “C”"]),
    ("block beyond the pool in a fact", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "ref_cnt: {9: 0}"), [
        "s.yaml:16: expect[0].ref_cnt[9]: there is no block 9; the pool has the blocks 0 to 8"]),
    ("blocks beyond the pool in a list", edited("[3, 4, 5, 6, 7, 8, 2, 1]", "[2, 9, -1]"), [
        "s.yaml:16: expect[0].free_queue: there are no blocks 9, -1; the pool has the blocks 0 to 8"]),
    ("unknown status", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "status: {A: FINISHED}"), [
        "s.yaml:16: expect[0].status.A: there is no status “FINISHED”"]),
    ("unknown cause", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "cause: not_cachd"), [
        "s.yaml:16: expect[0].cause: there is no cause of the kind “not_cachd”; did you mean “not_cached”?"]),
    ("count of an unknown kind", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "count: {kv_write: 1}"), [
        "s.yaml:16: expect[0].count.kv_write: there is no event of the kind “kv_write”; did you mean “kv_written”?"]),
    ("field of an event at the end", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "block_ids: [1]"), [
        "s.yaml:16: expect[0].block_ids: “end” is a frame and not an event, so it has no block_ids; select an event"]),
    ("field that the event has not", edited("at: end\n    free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "at: kv_written\n    event: {block_ids: [1]}"), [
        "s.yaml:16: expect[0].event.block_ids: the event kv_written has no field “block_ids”; its fields are "]),
    # actions
    ("abort of nobody", GOOD + "actions:\n  - {at_step: 2, do: abort}\n", [
        "s.yaml:18: actions[0]: it is not said which request is to be aborted; add “request”"]),
    ("reset of a request", GOOD + "actions: [{at_step: 2, do: reset_prefix_cache, request: A}]\n", [
        "s.yaml:17: actions[0].request: reset_prefix_cache concerns no single request; leave “request” out"]),
    ("abort of an unknown request", GOOD + "actions: [{at_step: 2, do: abort, request: Z}]\n", [
        "s.yaml:17: actions[0].request: there is no request “Z”"]),
    # the YAML itself
    ("field twice", GOOD + "title: Another\n", ["s.yaml:17: title: this field is given twice, first in line 2; keep one of them"]),
    ("anchor", edited("[3, 4, 5, 6, 7, 8, 2, 1]", "&q [1]"), ["s.yaml:16: expect[0].free_queue: the anchor &q is not allowed in scenarios"]),
    ("alias", "id: scene\ntitle: *t\n", ["s.yaml:2: title: the alias *t is not allowed in scenarios; write the value out again"]),
    ("tag", edited("See something.", "!!python/object/apply:os.system [ls]"), ["s.yaml:4: goal: the tag tag:yaml.org,2002:python/object/apply:os.system"]),
    ("merge key", edited("num_blocks: 9", "<<: 9"), ["s.yaml:6: config.num_blocks: this field is missing", "s.yaml:6: config.<<: there is no such field"]),
    ("tab", "id: scene\nconfig:\n\tnum_blocks: 9\n", ["s.yaml:3: a tab stands where YAML wants blanks; indent with blanks"]),
    ("open bracket", edited("[fathers, brought]", "[fathers, brought"), ["s.yaml:11: this is not YAML ("]),
    ("colon in a text", edited("title: A title", "title: One: two"), ["s.yaml:2: this is not YAML (mapping values are not allowed here); put texts"]),
    ("control character", edited("A title", "A \x07 title"), ["s.yaml:2: the character U+0007 may not stand in a scenario; delete it"]),
    ("very many values", edited("[3, 4, 5, 6, 7, 8, 2, 1]", "[" + "1," * 31_000 + "]"), [
        "s.yaml:16: expect[0].free_queue: the file has more than 30000 values, which is more than a scenario may have; shorten it"]),
    ("half a character", edited("A title", '"\\ud800"'), ["s.yaml:2: title: this text has half a character in it"]),
    ("half a character as a forced token", edited("[fathers, brought]", '["\\ud800"]'), [
        "s.yaml:10: requests[0].force[0]: a forced token cannot be half a character"]),
    ("half a character in a key", edited("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", 'block_table: {"\\ud800": [1]}'), ["s.yaml:16: expect[0]"]),
    ("two documents", GOOD + "---\nid: other\n", ["s.yaml:17: a second scenario begins here; give each its own file"]),
    ("list instead of fields", "- id: scene\n", ["s.yaml:1: the file does not begin with a field; a scenario has fields like"]),
    ("empty file", "# only a comment\n", ["s.yaml:1: the file is empty; a scenario has fields like"]),
    ("deep nesting", "id: " + "[" * 30, ["s.yaml:1: id" + "[0]" * 18 + ": lists and fields are nested more than 20 deep"]),
    ("key that is a list", edited("num_blocks: 9", "[1]: 9"), ["s.yaml:6: config: the name of a field must be a text or a block's number"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_bad_scenario_names_line_field_and_remedy(text: str, expected: list[str]) -> None:
    assert_refused(text, expected)


def test_the_good_scenario_is_good(words: WordTokenizer) -> None:
    assert open_session(parse_scenario(GOOD, "s.yaml")).run_to_end().complete


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = edited("num_blocks: 9, block_size: 4", "num_blocks: 0, block_size: x").replace("say: A sentence.", "say: 7").replace("title: A title\n", "")
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, "s.yaml")
    assert [(p.line, p.path) for p in caught.value.problems] == [
        (1, ("title",)),
        (5, ("config", "num_blocks")),
        (5, ("config", "block_size")),
        (12, ("notes", 0, "say")),
    ]


RESOLVED: list[tuple[str, str, str]] = [
    ("prompt longer than the pool", edited("num_blocks: 9", "num_blocks: 2"),
     "s.yaml:9: requests[0].prompt: a prompt of 7 tokens needs 2 blocks of 4, but the pool has 1 usable block (num_blocks 2 less the null block 0); "
     "shorten it or set num_blocks to 3 or more"),
    ("prompt and outputs longer than the pool", edited("num_blocks: 9", "num_blocks: 3"),
     "s.yaml:8: requests[0]: 7 prompt tokens and 2 outputs need 3 blocks of 4, but the pool has 2 usable blocks (num_blocks 3 less the null block 0); "
     "lower max_tokens or set num_blocks to 4 or more"),
    ("prompt as long as the model allows", edited("block_size: 4", "block_size: 4, max_model_len: 7"),
     "s.yaml:9: requests[0].prompt: the prompt has 7 tokens, but with max_model_len 7 at most 6 can be followed by an output; shorten it or raise"),
    ("token outside the vocabulary", edited("prompt: Four score and seven years ago our", "prompt_token_ids: [5, 10000]"),
     "s.yaml:9: requests[0].prompt_token_ids[1]: there is no token 10000; the vocabulary of none goes from 0 to 9999"),
    ("forced id outside the vocabulary", edited("[fathers, brought]", "[fathers, 12345]"),
     "s.yaml:10: requests[0].force[1]: there is no token 12345; the vocabulary of none goes from 0 to 9999"),
    ("forced text of two tokens", edited("[fathers, brought]", "[fathers brought, forth]"),
     "s.yaml:10: requests[0].force[0]: the text “fathers brought” is 2 tokens of none (“fathers”, “brought”) and must be exactly 1; force them one by one"),
    ("forced text without a token", edited("[fathers, brought]", "[fathers, ' ']"),
     "s.yaml:10: requests[0].force[1]: the text “ ” is 0 tokens of none (none) and must be exactly 1"),
    ("prompt without a token", edited("Four score and seven years ago our", "' '"),
     "s.yaml:9: requests[0].prompt: this text has no token for none; write at least one word"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in RESOLVED], ids=[c[0] for c in RESOLVED])
def test_what_the_model_or_the_pool_cannot_serve_is_refused(words: WordTokenizer, text: str, expected: str) -> None:
    assert_refused(text.replace("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "running: []"), [expected], opens=True)


def test_unknown_model_is_a_problem_of_the_file_or_of_the_call() -> None:
    scenario = parse_scenario(edited("model: none", "model: tinny"), "s.yaml")
    with pytest.raises(ScenarioError, match=r"^s\.yaml:5: model: There is no model named 'tinny': choose one of tiny, "):
        open_session(scenario)
    with pytest.raises(InvalidInput, match=r"^There is no model named 'tinnny': choose one of tiny, "):
        open_session(scenario, model="tinnny")


def test_problems_of_all_requests_are_reported_at_once(words: WordTokenizer) -> None:
    text = edited("notes:", "  - {id: B, prompt_token_ids: [99999], force: [nothing]}\nnotes:").replace("num_blocks: 9", "num_blocks: 2")
    text = text.replace("free_queue: [3, 4, 5, 6, 7, 8, 2, 1]", "running: []")
    with pytest.raises(ScenarioError) as caught:
        open_session(parse_scenario(text, "s.yaml"))
    assert [(p.line, p.path) for p in caught.value.problems] == [
        (9, ("requests", 0, "prompt")),
        (11, ("requests", 1, "prompt_token_ids", 0)),
        (11, ("requests", 1, "force", 0)),
    ]


def test_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("id: scene\ntitle: Käse\n".encode("latin-1"))
    with pytest.raises(ScenarioError, match=r"latin\.yaml:2: byte 0xe4 is not UTF-8; save the file as UTF-8 text$"):
        load_scenario(latin)
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"# " + b"x" * 1_000_000)
    with pytest.raises(ScenarioError, match=r"huge\.yaml: the file has more than 1000 kB"):
        load_scenario(str(huge))
    with pytest.raises(ScenarioError, match=r"nowhere\.yaml: the file cannot be read \(no such file or directory\); check the path$"):
        load_scenario(tmp_path / "nowhere.yaml")
    with pytest.raises(ScenarioError, match=r"the file cannot be read \(is a directory\); check the path$"):
        load_scenario(tmp_path)


def test_byte_order_mark_and_windows_line_ends_are_fine() -> None:
    assert parse_scenario(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode(), "s.yaml").id == "scene"


def test_unknown_scene_names_the_nearest_and_the_command_that_lists_them() -> None:
    with pytest.raises(InvalidInput, match=r"^there is no scene “figure-66”: did you mean “figure-6”\? `python -m scenarios list` shows all"):
        load_scenario("figure-66")
    with pytest.raises(InvalidInput, match=r"^there is no scene “”: `python -m scenarios list`"):
        load_scenario("")
