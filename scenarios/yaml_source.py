"""Reads the YAML of a scenario into plain data and remembers in which line everything stands.

Only what scenarios need: mappings, lists, texts, whole numbers, fractions, true, false and null. Anchors, aliases and tags are refused (an alias can
make a short file unfold to gigabytes), and so are fields given twice. Words like `yes`, `no` and `on` and things that look like dates are texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from scenarios.problems import Path, Problem, ScenarioError

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 30_000
"""Reading takes about a second for as many; no scene that a person can watch needs more."""

_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", None)

_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {"true": True, "True": True, "false": False, "False": False, "null": None, "~": None, "": None}


@dataclass
class Source:
    """Where the parts of a scenario came from. `lines`: path -> line, counted from 1; empty for a scenario that was not read from a text."""

    name: str
    lines: dict[Path, int] = field(default_factory=dict)

    def problem(self, path: Path, message: str) -> Problem:
        """A problem at `path`, or at the nearest thing around it that stands in the file."""
        here = path
        while here and here not in self.lines:
            here = here[:-1]
        return Problem(self.name, self.lines.get(here), path, message)


def read_yaml(data: bytes | str, name: str) -> tuple[dict[str, Any], Source]:
    """The plain data of one YAML mapping, and its lines. `name` is what messages call the file.

    Raises ScenarioError for anything that is not one mapping in UTF-8 of at most `MAX_BYTES` bytes, `MAX_VALUES`
    values and `MAX_DEPTH` levels.
    """
    if len(data) > MAX_BYTES:
        raise ScenarioError([Problem(name, None, (), f"the file has more than {MAX_BYTES // 1000} kB, which is more than a scenario may have; shorten it")])
    text = _decode(data, name) if isinstance(data, bytes) else data
    try:
        builder = _built(text, name)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ScenarioError([Problem(name, line, (), f"the character U+{_code(error.character):04X} may not stand in a scenario; delete it")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ScenarioError([Problem(name, mark.line + 1 if mark else None, (), _yaml_message(error))]) from None
    except ValueError:  # PyYAML takes \\UFFFFFFFF for a character and lets chr() refuse it
        line = text.count("\n", 0, text.find("\\U")) + 1
        raise ScenarioError([Problem(name, line, (), "an escape like \\U00110000 names no character; write the character itself")]) from None
    if builder.problems:
        raise ScenarioError(builder.problems)
    if not isinstance(builder.document, dict):
        what = "the file is empty" if builder.document is None else "the file does not begin with a field"
        raise ScenarioError([Problem(name, 1, (), f"{what}; a scenario has fields like “id: my-scene”, and `python -m scenarios schema` lists them")])
    return builder.document, builder.source


@dataclass
class _Container:
    value: Any
    path: Path
    key: str | int | None = None


class _Builder:
    """Plain data from parser events, without recursion."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.document: Any = None
        self.problems: list[Problem] = []
        self._stack: list[_Container] = []
        self._num_documents = 0
        self._num_values = 0

    def take(self, event: yaml.Event) -> None:
        """One event. Mutates the document under construction. Raises ScenarioError where going on makes no sense."""
        if isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                self._stop(event, "a second scenario begins here; give each its own file")
        elif isinstance(event, yaml.AliasEvent):
            self._stop(event, f"the alias *{event.anchor} is not allowed in scenarios; write the value out again")
        elif isinstance(event, yaml.NodeEvent):
            self._node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._stack.pop()

    def _node(self, event: Any) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            self._stop(event, f"the file has more than {MAX_VALUES} values, which is more than a scenario may have; shorten it")
        if event.anchor is not None:
            self._stop(event, f"the anchor &{event.anchor} is not allowed in scenarios; leave it out and write values out where they are needed")
        if event.tag is not None:
            self._stop(event, f"the tag {event.tag} is not allowed in scenarios; leave it out (quotes make a text of anything)")
        if isinstance(event, yaml.ScalarEvent):
            self._place(event, event.value if event.style else _scalar(event.value), container=False)
        else:
            if len(self._stack) >= MAX_DEPTH:
                self._stop(event, f"lists and fields are nested more than {MAX_DEPTH} deep; no part of a scenario needs that")
            self._place(event, {} if isinstance(event, yaml.MappingStartEvent) else [], container=True)

    def _place(self, event: Any, value: Any, *, container: bool) -> None:
        path: Path = ()
        if self._stack:
            top = self._stack[-1]
            if isinstance(top.value, list):
                path = (*top.path, len(top.value))
                top.value.append(value)
            elif top.key is None:
                top.key = self._key(event, value, top)
                self.source.lines.setdefault((*top.path, top.key), event.start_mark.line + 1)
                return
            else:
                path = (*top.path, top.key)
                top.value[top.key] = value
                top.key = None
        else:
            self.document = value
        self.source.lines.setdefault(path, event.start_mark.line + 1)
        if container:
            self._stack.append(_Container(value, path))

    def _key(self, event: Any, value: Any, top: _Container) -> str | int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            self._stop(event, "the name of a field must be a text or a block's number; put it in quotes if it is meant as a text")
        key: str | int = value
        if key in top.value:
            first = self.source.lines[(*top.path, key)]
            message = f"this field is given twice, first in line {first}; keep one of them"
            self.problems.append(Problem(self.source.name, event.start_mark.line + 1, (*top.path, key), message))
        return key

    def _stop(self, event: Any, message: str) -> NoReturn:
        raise ScenarioError([*self.problems, Problem(self.source.name, event.start_mark.line + 1, self._here(), message)])

    def _here(self) -> Path:
        if not self._stack:
            return ()
        top = self._stack[-1]
        return top.path if top.key is None else (*top.path, top.key)


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _built(text: str, name: str) -> _Builder:
    """All events of the text, read by libyaml where it is there: it takes a tenth of the time, which a gallery of scenes notices. What it does not accept is
    read again in Python, whose messages are known."""
    if _FAST_LOADER is not None:
        builder = _Builder(Source(name))
        try:
            for event in yaml.parse(text, Loader=_FAST_LOADER):
                builder.take(event)
            return builder
        except yaml.YAMLError:
            pass
    builder = _Builder(Source(name))
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        builder.take(event)
    return builder


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ScenarioError([Problem(name, line, (), f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8 text")]) from None


def _yaml_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "something is not YAML"
    if "\\t" in problem:
        return "a tab stands where YAML wants blanks; indent with blanks"
    hint = "put texts that contain “: ” or begin with a sign in quotes" if "mapping values" in problem else "check quotes, brackets and indentation above it"
    return f"this is not YAML ({problem}); {hint}"


def _code(character: str | bytes | int) -> int:
    return character if isinstance(character, int) else ord(character)
