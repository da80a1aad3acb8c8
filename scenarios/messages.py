"""Turns pydantic's errors into sentences that name the field, what is wrong with it, and how to mend it."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from scenarios import schema
from scenarios.problems import Path, Problem
from scenarios.scene import ID_PATTERN
from scenarios.yaml_source import Source

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "fields of its own",
    "model_type": "fields of its own",
    "model_attributes_type": "fields of its own",
}
_PATTERNS = {
    ID_PATTERN: "small letters and digits with single hyphens between them, as in “figure-6”",
    schema.RULE_PATTERN: "the name of a rule, as in “S14”",
    schema.REQUEST_ID_PATTERN: "letters, digits, “_”, “.” and “-”, beginning with a letter or digit",
}


def problems_of(error: ValidationError, source: Source, root: type[BaseModel] = schema.Scenario, under: Path = ()) -> list[Problem]:
    """One problem per pydantic error, at its place in the file. `root`: the model that was validated, which stands `under` this path of the file."""
    return [_problem(dict(e), source, root, under) for e in error.errors()]


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant, None when nothing is near."""
    found = difflib.get_close_matches(word.lower(), {w.lower(): w for w in words}, n=1, cutoff=0.6)
    return next((w for w in words if found and w.lower() == found[0]), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``did you mean “x”?`` or ``choose one of …``."""
    names = list(words)
    near = nearest(word, names)
    return f"did you mean “{near}”?" if near else f"choose one of {', '.join(names)}"


def shown(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, str):
        return f"the text “{value if len(value) <= 60 else value[:57] + '…'}”"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a group of fields"
    if isinstance(value, list | tuple):
        return "a list"
    return str(value)


def _problem(error: dict[str, Any], source: Source, root: type[BaseModel], under: Path) -> Problem:
    path: Path = tuple(part for part in error["loc"] if part != "[key]")
    return source.problem((*under, *path), _message(error, path, root))


def _part_at(root: type[BaseModel], path: Path) -> type[BaseModel]:
    """The model whose fields stand at `path` inside `root`."""
    for name in path:
        if isinstance(name, str) and name in root.model_fields:
            root = next(_models_in(root.model_fields[name].annotation), root)
    return root


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)


def _message(error: dict[str, Any], path: Path, root: type[BaseModel]) -> str:
    kind, value, ctx = error["type"], error.get("input"), error.get("ctx") or {}
    if kind == "missing":
        return "this field is missing; add it"
    if kind == "extra_forbidden":
        return f"there is no such field here; {did_you_mean(str(path[-1]), _part_at(root, path[:-1]).model_fields)}"
    if kind in _WANTED:
        return f"this must be {_WANTED[kind]}, not {shown(value)}; {_mend(kind, value)}"
    if kind == "greater_than_equal":
        return f"this is {value}, but it must be at least {ctx['ge']:g}; give a larger number"
    if kind == "less_than_equal":
        return f"this is {value}, but it may be at most {ctx['le']:g}; give a smaller number"
    if kind == "greater_than":
        return f"this is {value}, but it must be more than {ctx['gt']:g}; give a larger number"
    if kind == "less_than":
        return f"this is {value}, but it must be less than {ctx['lt']:g}; give a smaller number"
    if kind in ("string_too_short", "too_short"):
        return "this is empty; put something in, or leave the field out if it may be missing"
    if kind == "string_too_long":
        return f"this text has {len(str(value))} characters, but it may have at most {ctx['max_length']}; shorten it"
    if kind == "too_long":
        return f"this list has {len(value or ())} entries, but it may have at most {ctx['max_length']}; shorten it"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} does not fit; use {_PATTERNS.get(ctx['pattern'], 'a text of the pattern ' + ctx['pattern'])}"
    if kind == "literal_error":
        choices = [c.strip("'") for c in str(ctx["expected"]).replace(" or ", ", ").split(", ")]
        return f"{shown(value)} is not one of the choices; {did_you_mean(str(value), choices)}"
    if kind == "string_unicode":
        return "this text has half a character in it (a lone surrogate), which no text file can hold; type it again"
    if kind == "finite_number":
        return "this number is too large to be used; give a smaller number"
    if kind == "value_error":
        return f"{ctx['error']}, but this is {shown(value)}; correct it or leave it out"
    return f"{str(error['msg']).rstrip('.').lower()}; correct it"


def _mend(kind: str, value: Any) -> str:
    if kind == "string_type" and not isinstance(value, list | Mapping):
        return "put it in quotes"
    if kind.startswith("int") and isinstance(value, str) and value.strip("+-").isdigit():
        return "take the quotes away"
    if kind == "list_type":
        return "write it in brackets, as in [1, 2], or with a hyphen before each entry"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return "write its fields indented below it, each as “name: value”"
    if kind == "bool_type":
        return "write true or false, without quotes"
    return "correct it"
