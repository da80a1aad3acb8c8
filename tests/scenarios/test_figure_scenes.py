"""Figure scenes: what they compute, against the paper's numbers typed here by hand; and what is said about files that are wrong."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.errors import InvalidInput
from engine.models.tiny_tokenizer import TINY_DIR
from engine.paper.memory_model import SHAPES
from scenarios import FigureScene, ScenarioError, list_scenarios, list_scenes, load_figure, load_scenario, load_scene
from scenarios.__main__ import main
from scenarios.expectations import select
from scenarios.figures.command_line import figure_schema
from scenarios.figures.memory_layout import tokens_held
from scenarios.figures.reading import check_values, compute, figure_from_plain, parameters_of
from scenarios.figures.registry import KINDS
from scenarios.loader import READING_ORDER, figure_files, library_files, parse_scene, scene_files
from scenarios.runner import run
from scenarios.workloads import load_workload
from scenarios.yaml_source import read_yaml

Capture = pytest.CaptureFixture[str]
FIGURES = sorted(figure_files())
GOOD = """id: strips
title: "Strips"
source: "somewhere"
goal: "See slots."
figure: reservation_strips
parameters:
  gap_slots: 3
  block_size: 4
  requests:
    - {id: A, prompt: [a, b], strip: [c, <eos>], num_later: 1, max_length: 8}
notes:
  - say: "A sentence."
expect:
  A.never: 4
"""


def values(scene: str) -> dict[str, Any]:
    return dict(compute(load_figure(scene)).values)


@pytest.mark.parametrize("scene", FIGURES)
def test_every_expected_value_comes_out(scene: str) -> None:
    made = load_figure(scene)
    assert [str(f) for f in check_values(made, compute(made))] == []
    assert len(made.expect) >= 4
    assert len(made.notes) >= 4
    assert made.group == "paper"
    for text in (made.goal, *(n.say for n in made.notes)):
        assert text.endswith((".", "!", "?")), text


def test_the_figures_that_a_lecture_needs_are_there() -> None:
    assert {"figure-1", "figure-2", "figure-3", "figure-4", "page-table", "iteration-level-batching", "kv-bytes"} <= set(FIGURES)


@pytest.mark.parametrize("scene", FIGURES)
def test_links_lead_to_scenes_and_to_the_step_that_they_promise(scene: str) -> None:
    for link in load_figure(scene).links:
        if link.scene is None:
            continue
        assert link.scene in scene_files(), link.scene
        if link.step is not None:
            assert link.at is not None
            frame = select(link.at, run(link.scene).trace.frames)
            assert frame is not None
            assert frame.seq == link.step


def test_figure_1_and_table_1() -> None:
    """Paper, Figure 1, section 3 and Table 1: 26 GB are 65 %, KV cache over 30 %; 12 GB of 800 KB tokens are 15.7K slots, 21 GB 9.7K, 264 GB 60.1K."""
    ours = values("figure-1")
    assert round(ours["parameters_gb"]) == 26
    assert ours["percent.parameters"] == pytest.approx(65, abs=1)
    assert ours["percent.kv_cache"] > 30
    assert ours["percent.parameters"] + ours["percent.kv_cache"] + ours["percent.rest"] == pytest.approx(100)
    assert ours["kv_bytes_per_token"] == 2 * 5120 * 40 * 2
    assert ours["contiguous.max_requests"] == int(ours["num_slots"] / 2048) == 7
    for name, slots in (("OPT-13B", 15.7), ("OPT-175B", 60.1)):
        assert round(ours[f"table_1.{name}.num_slots"] / 1000, 1) == slots
    paper = {
        ("OPT-13B", "gpu_gb"): 40, ("OPT-13B", "parameters_gb"): 26, ("OPT-13B", "kv_cache_gb"): 12, ("OPT-13B", "num_slots"): 15_700,
        ("OPT-66B", "gpu_gb"): 160, ("OPT-66B", "parameters_gb"): 132, ("OPT-66B", "kv_cache_gb"): 21, ("OPT-66B", "num_slots"): 9_700,
        ("OPT-175B", "gpu_gb"): 640, ("OPT-175B", "parameters_gb"): 346, ("OPT-175B", "kv_cache_gb"): 264, ("OPT-175B", "num_slots"): 60_100,
    }  # fmt: skip
    assert {key: ours[f"paper.table_1.{key[0]}.{key[1]}"] for key in paper} == paper


def test_the_running_requests_slots_counted_one_by_one() -> None:
    """The mean that Figure 1 draws, against a count of every iteration of every request."""
    whole = load_workload("alpaca-like").requests
    total = sum(-(-(r.prompt_len + k) // 16) * 16 for r in whole for k in range(1, r.output_len + 1))
    assert tokens_held("alpaca-like", 16) == pytest.approx(total / sum(r.output_len for r in whole), rel=1e-12)


def test_figure_2_beside_the_paper() -> None:
    """Figure 2: token states, reservation, internal, external. 20.4 and 38.2 stand in the text; four parts are unconfirmed."""
    result = compute(load_figure("figure-2"))
    paper = {
        "orca_max": (20.4, 13.3, 57.3, 8.9),
        "orca_pow2": (26.8, 17.9, 13.6, 41.6),
        "orca_oracle": (38.2, 25.2, None, 36.6),
        "paged": (96.3, None, None, None),
    }
    parts = ("token_states", "reservation", "internal", "external")
    for system, numbers in paper.items():
        assert [result.values.get(f"paper.{system}.{part}") for part in parts] == list(numbers)
        assert sum(float(str(result.values[f"{system}.{part}"])) for part in parts) == pytest.approx(100)
    assert set(result.unconfirmed) == {
        f"paper.{name}" for name in ("orca_max.reservation", "orca_max.external", "orca_pow2.token_states", "orca_pow2.internal")
    }
    assert all(result.quoted[name].startswith("paper, Figure 2") for name in result.unconfirmed)


def test_figure_3_counts() -> None:
    """Figure 3: 7 + 1 + 2 + 2038 = 2048 and 3 + 1 + 1 + 507 = 512."""
    ours = values("figure-3")
    assert [ours[f"A.{part}"] for part in ("prompt", "now", "later", "never", "slots")] == [7, 1, 2, 2038, 2048]
    assert [ours[f"B.{part}"] for part in ("prompt", "now", "later", "never", "slots")] == [3, 1, 1, 507, 512]
    chunks = {chunk["id"]: chunk for chunk in compute(load_figure("figure-3")).data["chunks"]}
    assert chunks["A"]["words"] == [*["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth", "<eos>", "<resv>"]]
    assert chunks["B"]["words"] == [*["You", "only", "live", "once", "<eos>", "<resv>"]]
    sixteen = compute(load_figure("figure-3"), {"block_size": 16}).values
    assert [sixteen[f"{r}.paged.{part}"] for r in "AB" for part in ("blocks", "empty")] == [1, 8, 1, 12]


def test_figure_4_has_the_papers_boxes() -> None:
    """Figure 4: scheduler; KV cache manager with block tables, CPU and GPU block allocator; workers 0 to N-1, each with cache engine and model shard."""
    ours = values("figure-4")
    assert set(ours["inside.KV Cache Manager"]) == {"Block tables", "CPU Block Allocator", "GPU Block Allocator"}
    assert ours["inside.Worker 0"] == ["Cache Engine 0", "Model Shard 0"]
    assert ours["inside.Worker N − 1"] == ["Cache Engine N − 1", "Model Shard N − 1"]


@pytest.mark.parametrize("position", range(9))
def test_page_table_against_a_table_of_all_slots(position: int) -> None:
    """Figure 6: blocks 7, 1 and 3; the memory written out slot by slot, as the figure draws it."""
    memory: list[str | None] = [None] * 36
    memory[28:32] = ["Four", "score", "and", "seven"]
    memory[4:8] = ["years", "ago", "our", "fathers"]
    memory[12] = "brought"
    found = compute(load_figure("page-table"), {"position": position}).values
    assert isinstance(found["slot"], int)
    assert memory[found["slot"]] == found["token"]
    assert found["physical_address"] == [2, 5, 0][position // 4] * 4096 + position % 4 * 1024


def test_page_that_is_not_mapped_is_a_fault_and_not_an_error() -> None:
    result = compute(load_figure("page-table"), {"page_table": [2, None, 0]})
    assert result.values["frame"] is None
    assert result.values["physical_address"] is None
    assert result.values["slot"] == 5


def test_kv_bytes() -> None:
    """Section 3: 2 x 5120 x 40 x 2 bytes = 800 KB per token, 1.6 GB for 2048 tokens; and the shapes are those of the models."""
    ours = values("kv-bytes")
    assert ours["OPT-13B.bytes_per_token"] == 800 * 1024
    assert ours["OPT-13B.bytes_per_request"] == 800 * 1024 * 2048
    assert (ours["paper.kb_per_token"], ours["paper.gb_per_request"]) == (800, 1.6)
    for name, shape in SHAPES.items():
        assert ours[f"{name}.bytes_per_token"] == shape.kv_bytes_per_token
    config = json.loads((TINY_DIR / "config.json").read_text())
    layers, heads, head_size = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
    assert ours["tiny.bytes_per_token"] == 2 * layers * heads * head_size * 4  # the worker's cache is in 32 bits


def test_iteration_level_batching_by_hand() -> None:
    """Outputs 8, 3, 5, 4, 6, 2 on 3 places. Whole batches: 0 to 8 and 8 to 14. By iteration: R4 at 3 (R2 left), R5 at 5 (R3), R6 at 7 (R4)."""
    ours = values("iteration-level-batching")
    assert [ours[f"request.returned.R{i}"] for i in range(1, 7)] == [8, 8, 8, 14, 14, 14]
    assert [ours[f"iteration.returned.R{i}"] for i in range(1, 7)] == [8, 3, 5, 7, 11, 9]
    assert ours["request.padding"] == (8 - 3) + (8 - 5) + (6 - 4) + (6 - 2)
    assert ours["iteration.utilisation_percent"] == pytest.approx(100 * 28 / 33)


# -- files, the command line, and what is wrong ---------------------------------------------------------------------------------------------------


def test_both_kinds_of_scenes_are_listed_and_loaded() -> None:
    assert set(scene_files()) == set(library_files()) | set(figure_files())
    assert not set(library_files()) & set(figure_files())
    assert {info.id for info in list_scenes() if info.figure} == set(FIGURES)
    assert {info.id for info in list_scenarios()} == set(library_files())
    assert [info.id for info in list_scenes() if info.id in READING_ORDER] == [name for name in READING_ORDER if name in scene_files()]
    assert isinstance(load_scene("figure-3"), FigureScene)
    with pytest.raises(ScenarioError, match=r"^paper/figure-3\.yaml:\d+: figure: “figure-3” is a figure: it is computed at once"):
        load_scenario("figure-3")
    with pytest.raises(ScenarioError, match=r"“figure-6” is not a figure: it runs step by step"):
        load_figure("figure-6")


@pytest.mark.parametrize("scene", FIGURES)
def test_scene_fits_the_printed_schema(scene: str) -> None:
    plain, _ = read_yaml(figure_files()[scene].read_bytes(), scene)
    validator = Draft202012Validator(figure_schema())
    assert [e.message for e in validator.iter_errors(plain)] == []
    assert list(validator.iter_errors({**plain, "parameters": {**plain["parameters"], "no_such": 1}}))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gap_slots: 3", "gap_slots: -3", "s.yaml:7: parameters.gap_slots: this is -3, but it must be at least 0; give a larger number"),
        ("gap_slots: 3", "gap_slots: three", "s.yaml:7: parameters.gap_slots: this must be a whole number, not the text “three”; correct it"),
        ("gap_slots: 3", "gapslots: 3", "s.yaml:7: parameters.gapslots: there is no such field here; did you mean “gap_slots”?"),
        ("max_length: 8}", "max_len: 8}", "s.yaml:10: parameters.requests[0].max_len: there is no such field here; did you mean “max_length”?"),
        ("figure: reservation_strips", "figure: batchin", "s.yaml:5: figure: there is no figure of the kind “batchin”; did you mean “batching”?"),
        ("figure: reservation_strips", "figure: 3", "s.yaml:5: figure: this must be a text, not 3; put it in quotes"),
        ("parameters:\n", "parameter:\n", "s.yaml:6: parameter: there is no such field here; did you mean “parameters”?"),
        ("notes:\n", "steps: 3\nnotes:\n", "s.yaml:11: steps: there is no such field here; "),
        ('  - say: "A sentence."', '  - tell: "A sentence."', "s.yaml:12: notes[0].tell: there is no such field here; "),
        ("goal:", "#", "s.yaml:1: goal: this field is missing; add it"),
        ("A.never: 4", "A.never: {value: 4}", "s.yaml:14: expect.A.never.tolerance: this field is missing; add it"),
        ("A.never: 4", "A.never: {value: 4, tolerance: 0}", "s.yaml:14: expect.A.never.tolerance: this is 0, but it must be more than 0; give a larger number"),
        ("notes:\n", "links:\n  - {say: There.}\nnotes:\n", "s.yaml:12: links[0]: a link leads to a scene or to a screen; "),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_its_line_and_field(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as caught:
        parse_scene(GOOD.replace(old, new, 1), "s.yaml")
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    bad = GOOD.replace("goal:", "gaol:").replace("gap_slots: 3", "gap_slots: -3")
    with pytest.raises(ScenarioError) as caught:
        parse_scene(bad, "s.yaml")
    assert [p.path for p in caught.value.problems] == [("goal",), ("gaol",), ("parameters", "gap_slots")]


@pytest.mark.parametrize(
    ("scene", "changes", "message"),
    [
        ("figure-1", {"shape": "OPT-175B"}, r"349\.2 GB of parameters.*take a larger card or a smaller model"),
        ("figure-1", {"shape": "GPT-17"}, r"parameters\.shape: the text “GPT-17” is not one of the choices"),
        ("figure-1", {"workload": "nobody"}, r"workload 'nobody' is unknown"),
        ("figure-2", {"num_requests": 0}, r"parameters\.num_requests: this is 0, but it must be at least 1"),
        ("figure-2", {"block_size": 256, "num_slots": 100}, r"block_size is 256, but the whole memory has only 100 slots"),
        ("page-table", {"position": 9}, r"no token at position 9; the positions are 0 to 8$"),
        ("page-table", {"block_table": [7, 1]}, r"9 tokens need 3 blocks of 4, but the block table has 2"),
        ("page-table", {"block_table": [7, 1, 9]}, r"entries must lie between 0 and 8"),
        ("page-table", {"page_bytes": 4098}, r"a page of 4098 bytes cannot be divided"),
        ("iteration-level-batching", {"max_batch_size": 0}, r"parameters\.max_batch_size: this is 0"),
        ("kv-bytes", {"request_tokens": 0}, r"parameters\.request_tokens: this is 0"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_give_one_sentence(scene: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        compute(load_figure(scene), changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scene", "field", "change", "message"),
    [
        ("kv-bytes", "shapes", lambda rows: [*rows, rows[0]], "two shapes are called “OPT-13B”"),
        ("iteration-level-batching", "requests", lambda rows: [*rows, rows[0]], "the id “R1” is used twice"),
        ("figure-3", "requests", lambda rows: [*rows, rows[0]], "the id “A” is used twice"),
        ("figure-3", "requests", lambda rows: [{**rows[0], "max_length": 9}], "needs 10 slots in the end, but only 9 are reserved"),
        ("figure-4", "boxes", lambda rows: [*rows, rows[0]], "two boxes are called “Scheduler”"),
        ("figure-4", "boxes", lambda rows: rows[1:], "there is no box “Scheduler”"),
        ("figure-4", "boxes", lambda rows: [{**rows[0], "x": 99}, *rows[1:]], "the box “Scheduler” sticks out of the drawing"),
    ],
)
def test_parts_that_do_not_go_together_give_one_sentence(scene: str, field: str, change: Any, message: str) -> None:
    made = load_figure(scene)
    with pytest.raises(InvalidInput, match=message):
        compute(made, {field: change(made.parameters[field])})


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        ("A.never: 4", True), ("A.never: 4.0", True), ("A.never: 5", False), ("A.never: true", False), ("A.never: '4'", False), ("A.now: true", False),
        ("A.never: {value: 4.5, tolerance: 0.5}", True), ("A.never: {value: 4.6, tolerance: 0.5}", False), ("A.never: [4]", False),
    ],
)  # fmt: skip
def test_an_expected_value_is_exact_unless_a_tolerance_is_given(wanted: str, holds: bool) -> None:
    scene = parse_scene(GOOD.replace("A.never: 4", wanted), "s.yaml")
    assert isinstance(scene, FigureScene)
    assert (check_values(scene, compute(scene)) == []) is holds


def test_the_terminal_prints_values_checks_them_and_exits_as_for_scenarios(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    assert main(["run", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  A\.never +4$", out, re.MULTILINE)
    assert "│ A sentence." in out
    assert out.endswith("all 1 expected values hold\n")
    assert main(["run", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["figure"], summary["values"]["A.never"], summary["failures"]) == ("reservation_strips", 4, [])
    path.write_text(GOOD.replace("A.never: 4", "A.never: 5").replace("expect:", "expect:\n  A.nothing: 1"))
    for command in (["check", str(path)], ["run", str(path)], ["run", str(path), "--json"]):
        assert main(command) == 1
        printed = capsys.readouterr().err.splitlines()
        assert printed[0].startswith(f"{path}:14: expect.A.nothing: strips: no such value is computed; ")
        assert printed[1] == f"{path}:15: expect.A.never: strips: expected 5, got 4"
    for option in (["--model", "tiny"], ["--until", "3"], ["--trace", str(tmp_path / "t.json")]):
        assert main(["run", str(path), *option]) == 2
        assert "runs no model and has no steps, so leave --" in capsys.readouterr().err
    assert main(["schema", "--figure"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]["figure"]["enum"]) == set(KINDS)
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(scene)} ", out, re.MULTILINE) for scene in scene_files())
    assert main(["check", *FIGURES]) == 0
    assert capsys.readouterr().out.count("expected values hold (a figure)") == len(FIGURES)


def test_unconfirmed_values_are_marked_in_the_terminal(capsys: Capture) -> None:
    assert main(["run", "figure-2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"paper\.orca_max\.reservation +13\.3  \[quoted: paper, Figure 2, unconfirmed; unconfirmed: ", out)
    assert not re.search(r"  orca_max\.reservation .*unconfirmed", out)


def test_a_change_on_a_screen_is_checked_like_a_file() -> None:
    with pytest.raises(ScenarioError, match=r"parameters\.card_gb: this must be a whole number"):
        parameters_of(load_figure("figure-1"), {"card_gb": "forty"})


JUNK: list[Any] = [None, True, -1, 0, 3.5, 1e308, "", "x", "<eos>", [], [1], [None], {}, {"a": 1}, 10**18, "figure-6", {"value": 1, "tolerance": 1}]


def places(part: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where values stand inside plain data."""
    inside = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [*([path] if path else []), *(place for key, value in inside for place in places(value, (*path, key)))]


@pytest.mark.parametrize("scene", [name for name in FIGURES if name != "figure-2"])  # a second each
def test_whatever_stands_in_a_file_is_computed_or_refused_in_sentences(scene: str) -> None:
    plain, source = read_yaml(figure_files()[scene].read_bytes(), scene)
    draw = random.Random(scene)
    refusals: list[str] = []
    for _ in range(60):
        changed = copy.deepcopy(plain)
        place = draw.choice([p for p in places(changed) if p[0] not in ("notes", "links")])
        around: Any = changed
        for key in place[:-1]:
            around = around[key]
        around[place[-1]] = copy.deepcopy(draw.choice(JUNK))
        try:
            made = figure_from_plain(changed, source)
            check_values(made, compute(made))
        except InvalidInput as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert all(len(sentence) > 20 for sentence in refusals)
