"""`python -m engine.models list [--json] | pull NAME [--accept-licence] | card NAME | train tiny|tiny-swa|tiny-hybrid [--out FOLDER] [--steps N]`. Exit code 0:
done; 2: one sentence says why not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.errors import InvalidInput, PagewalkError
from engine.models.cards import CARDS
from engine.models.catalog import EMBEDDED, GEMMA3, SMOLLM2, list_models, resolve
from engine.models.download import Progress
from engine.models.terms import Terms


def show_progress() -> Progress:
    """A line that rewrites itself on a terminal, a line per tenth elsewhere; on stderr."""
    shown = -1
    on_terminal = sys.stderr.isatty()

    def progress(done: int, total: int | None) -> None:
        nonlocal shown
        percent = int(100 * done / total) if total else 0
        mark = percent if on_terminal else percent // 10 * 10
        if mark == shown:
            return
        shown = mark
        end = "\n" if not on_terminal or percent == 100 else ""
        lead = "\r" if on_terminal else ""
        print(f"{lead}  {done / 1e6:6.1f} MB  {percent:3d} %", end=end, file=sys.stderr, flush=True)

    return progress


def ask(terms: Terms, accepted: bool) -> bool:
    """Shows the terms; True when they were accepted on the command line, or with a `yes` on a terminal."""
    print(f"The weights of this model are under the {terms.name}: {terms.address}\n{terms.meaning}")
    if accepted:
        print(f"You have accepted the {terms.name} with --accept-licence.")
        return True
    if not sys.stdin.isatty():
        return False
    try:
        return input("Type yes to accept them: ").strip().lower() == "yes"
    except EOFError:
        return False


def show_list(as_json: bool) -> None:
    """The named models, and how to get those that are missing."""
    models = list_models()
    if as_json:
        print(json.dumps([asdict(info) for info in models], indent=2))
        return
    for info in models:
        print(f"{info.name:14} {'installed' if info.installed else 'not here':10} {info.licence:18} {info.description}")
        if info.terms_address:
            print(f"{'':14} terms to accept before the pull: {info.terms_address}")
        if not info.installed:
            print(f"{'':14} get it: {info.how_to_get}")
    print("Any local Hugging Face folder of a llama-like architecture can be named by its path.")


def show_card(name: str) -> None:
    """What the model is and what to expect of it."""
    if name in CARDS:
        print(CARDS[name], end="")
        return
    folder = EMBEDDED.get(name) or resolve(name)[1]
    card = folder / "README.md"
    if not card.is_file():
        raise InvalidInput(f"The model folder {folder} has no card (README.md).")
    print(card.read_text(encoding="utf-8"), end="")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.models", description="The models that Pagewalk can run.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="what is there and how to get the rest")
    listing.add_argument("--json", action="store_true", help="as JSON")
    pulling = commands.add_parser("pull", help="fetch a model once; offline afterwards")
    pulling.add_argument("name", help=f"{SMOLLM2} or {GEMMA3}")
    pulling.add_argument("--accept-licence", action="store_true", help="accept the terms of use of a model that has some, without being asked")
    card = commands.add_parser("card", help="what a model is and what to expect of it")
    card.add_argument("name", help=f"{', '.join(EMBEDDED)}, {SMOLLM2}, {GEMMA3} or a folder")
    training = commands.add_parser("train", help="train an embedded model from nothing (minutes)")
    training.add_argument("name", choices=list(EMBEDDED))
    training.add_argument("--out", type=Path, default=None, help="folder to write, default: the one in the repository")
    training.add_argument("--steps", type=int, default=None, help="training steps")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        if options.command == "list":
            show_list(options.json)
        elif options.command == "card":
            show_card(options.name)
        elif options.command == "pull":
            from engine.models.pull import pull

            pull(options.name, progress=show_progress(), accept=lambda terms: ask(terms, options.accept_licence))
        else:
            from engine.models.train_tiny import RECIPES, train

            recipe = RECIPES[options.name]
            steps = recipe.steps if options.steps is None else options.steps
            if steps < 1:
                raise InvalidInput(f"--steps is {steps}, but training takes at least 1 step.")
            train(recipe, options.out or recipe.folder, steps)
    except PagewalkError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        remark = "the same command goes on where this one stopped" if options.command == "pull" else "nothing was written"
        print(f"\nInterrupted: {remark}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
