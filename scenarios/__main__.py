"""``python -m scenarios``: list scenes, print the schema, check expectations, run a scene in the terminal, show a recorded one.

Exit code 0: it ran and every expectation held; 1: an expectation failed; 2: the scenario, or what was typed, is invalid; 3: the engine raised.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from engine.errors import InvalidInput, PagewalkError
from engine.models import list_models
from engine.runner import parse_layers
from engine.session_base import SessionBase
from engine.trace.codec import load, save
from engine.trace.frame import Trace
from scenarios.expectations import Decode, Failure, check_expectations, num_facts
from scenarios.figures.command_line import figure_schema, summary, value_lines
from scenarios.figures.reading import check_values, compute
from scenarios.figures.schema import FigureScene
from scenarios.final_state import final_state, outputs
from scenarios.loader import SceneInfo, list_scenes, load_scene
from scenarios.other_model import for_model
from scenarios.runner import load_vocabulary, open_session, place_notes
from scenarios.runner import run as run_scenario
from scenarios.schema import Scenario, json_schema
from scenarios.walk import placed_in, walk

OK, FAILED, INVALID, RAISED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Prints results on standard output and complaints on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a “?” and goes on
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return INVALID
    except PagewalkError as error:
        print(error, file=sys.stderr)
        return RAISED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of a pipe left; what is still to be flushed goes nowhere
        return OK
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scenarios", description="Scenes: list them, check them, run them in the terminal.")
    commands = parser.add_subparsers(required=True, metavar="list | schema | check | run | show")
    listing = commands.add_parser("list", help="the scenes of the library")
    listing.set_defaults(command=_list)
    schema = commands.add_parser("schema", help="the JSON Schema of a scenario file")
    schema.add_argument("--figure", action="store_true", help="of a figure scene's file instead")
    schema.set_defaults(command=_schema)
    check = commands.add_parser("check", help="run scenes and check what they expect")
    check.add_argument("ids", nargs="*", metavar="ID", help="a scene or a file (default: the whole library)")
    check.set_defaults(command=_check)
    run = commands.add_parser("run", help="run one scene and print it frame by frame")
    run.add_argument("scene", metavar="ID|FILE", help="a scene of the library, or a YAML file")
    run.add_argument("--json", action="store_true", help="print the final state instead")
    run.add_argument("--trace", metavar="OUT", help="write the trace to this file (.json, or .json.gz to compress)")
    run.add_argument("--model", metavar="M", help="another model than the scenario's")
    run.add_argument("--backend", metavar="B", help="triton, interpret or torch (default: what fits this machine)")
    run.add_argument("--layers", metavar="L", help="layers to run through Triton's interpreter: a number, several like 0,2, all or none (default: 0)")
    run.add_argument("--until", metavar="N", type=_frame_number, help="stop at frame N; then no expectation is checked")
    run.set_defaults(command=_run)
    show = commands.add_parser("show", help="print a trace file frame by frame")
    show.add_argument("trace", metavar="FILE", help="a trace that `run --trace` wrote")
    show.set_defaults(command=_show)
    return parser


def _frame_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"“{text}” is not the number of a frame; give a whole number, 0 for the first frame")
    return int(text)


def _list(_: argparse.Namespace) -> int:
    scenes = list_scenes()
    width = max((len(s.id) for s in scenes), default=0)
    for scene in scenes:
        print(f"{scene.id:<{width}}  {scene.group:<6}  {scene.title}")
        print(f"{'':<{width}}          {scene.goal} ({scene.source})")
    return OK


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(figure_schema() if arguments.figure else json_schema(), indent=2, ensure_ascii=False))
    return OK


def _check(arguments: argparse.Namespace) -> int:
    names = arguments.ids or [info.id for info in list_scenes() if not _is_left_out(info)]
    codes = [_check_one(name) for name in names]
    return next((code for code in (INVALID, RAISED, FAILED) if code in codes), OK)


def _is_left_out(info: SceneInfo) -> bool:
    """Whether the library is checked without this scene, because its model is not installed; says so."""
    missing = next((model for model in list_models() if model.name == info.model and not model.installed), None)
    if missing is not None:
        print(f"{info.id}: not checked, because {missing.name} is not installed; `{missing.how_to_get}` fetches it")
    return missing is not None


def _check_one(name: str) -> int:
    try:
        scene = load_scene(name)
        if isinstance(scene, FigureScene):
            return _check_figure(scene)
        result = run_scenario(scene)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return INVALID
    _complain(result.failures, result.error)
    if result.error is not None:
        return RAISED
    if result.failures:
        return FAILED
    print(f"{result.scenario.id}: all {num_facts(result.scenario.expect)} expected facts hold ({len(result.trace.frames)} frames)")
    return OK


def _check_figure(scene: FigureScene) -> int:
    failures = check_values(scene, compute(scene))
    _complain(failures, None)
    if failures:
        return FAILED
    print(f"{scene.id}: all {len(scene.expect)} expected values hold (a figure)")
    return OK


def _run_figure(scene: FigureScene, arguments: argparse.Namespace) -> int:
    given = [f"--{name}" for name in ("trace", "model", "backend", "layers", "until") if getattr(arguments, name) is not None]
    if given:
        raise InvalidInput(f"“{scene.id}” is a figure: it runs no model and has no steps, so leave {' and '.join(given)} out")
    result = compute(scene)
    failures = check_values(scene, result)
    if arguments.json:
        print(json.dumps(summary(scene, result), indent=2, ensure_ascii=False))
    else:
        for line in value_lines(scene, result):
            print(line)
        if not failures:
            print(f"all {len(scene.expect)} expected values hold")
    _complain(failures, None)
    return FAILED if failures else OK


def _run(arguments: argparse.Namespace) -> int:
    scenario = load_scene(arguments.scene)
    if isinstance(scenario, FigureScene):
        return _run_figure(scenario, arguments)
    layers = parse_layers(arguments.layers)
    session = open_session(scenario, model=arguments.model, backend=arguments.backend, interpreted_layers=layers)
    decode = load_vocabulary(arguments.model or scenario.model).decode
    trace = _record(session, arguments.until)
    held = for_model(scenario, arguments.model)
    place_notes(held, trace)
    failures = check_expectations(held, trace, decode) if arguments.until is None and session.error is None else []
    if arguments.trace is not None:
        save(trace, arguments.trace)
    if arguments.json:
        print(json.dumps(_summary(scenario, trace, decode, failures, session.error), indent=2, ensure_ascii=False))
    else:
        print(f"{scenario.title} ({scenario.source})")
        print(scenario.goal)
        for line in walk(trace, *placed_in(trace)):
            print(line)
        for request_id, output in outputs(trace, decode).items():
            print(f"{request_id}: {output['text']!r} ({output['status']})")
        if arguments.until is not None:
            print(f"stopped at frame {trace.frames[-1].seq}: expectations were not checked")
        elif not failures and session.error is None:
            print(f"all {num_facts(held.expect)} expected facts hold")
        if (left_out := num_facts(scenario.expect) - num_facts(held.expect)) and arguments.until is None:
            print(f"{left_out} facts were not checked: they are about the words of {scenario.model}, for which the scene was written")
    _complain(failures, session.error)
    return RAISED if session.error is not None else FAILED if failures else OK


def _show(arguments: argparse.Namespace) -> int:
    trace = load(arguments.trace)
    for line in walk(trace, *placed_in(trace)):
        print(line)
    return OK


def _record(session: SessionBase[Any, Any], until: int | None) -> Trace:
    if until is None:
        return session.run_to_end()
    session.run_until(lambda frame: frame.seq >= until)
    frames = session.trace.frames[: until + 1]
    return Trace(session.trace.header, frames, session.trace.complete and len(frames) == len(session.trace.frames))


def _summary(scenario: Scenario, trace: Trace, decode: Decode, failures: list[Failure], error: PagewalkError | None) -> dict[str, object]:
    return {
        "scenario": scenario.id,
        "model": trace.header.model.get("name"),
        "frames": len(trace.frames),
        "complete": trace.complete,
        "state": final_state(trace),
        "outputs": outputs(trace, decode),
        "failures": [str(f) for f in failures],
        "error": None if error is None else str(error),
    }


def _complain(failures: list[Failure], error: PagewalkError | None) -> None:
    for failure in failures:
        print(failure, file=sys.stderr)
    if error is not None:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
