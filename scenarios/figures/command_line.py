"""Figure scenes in the terminal: their values instead of frames."""

from __future__ import annotations

from typing import Any

from scenarios.figures.reading import check_values
from scenarios.figures.registry import KINDS
from scenarios.figures.schema import FigureResult, FigureScene, Value


def value_lines(scene: FigureScene, result: FigureResult) -> list[str]:
    """Title, goal, every value in a line of its own with its mark, and the notes."""
    width = max((len(name) for name in result.values), default=0)
    lines = [f"{scene.title} ({scene.source})", scene.goal]
    lines += [f"  {name:<{width}}  {_text(value)}{_mark(name, result)}" for name, value in result.values.items()]
    lines += [f"│ {note.say}{' (unconfirmed)' if note.unconfirmed else ''}" for note in scene.notes]
    lines += [f"│ You may have read: {c.read} Really: {c.really} ({c.rule})" for c in scene.corrections]
    return lines


def summary(scene: FigureScene, result: FigureResult) -> dict[str, object]:
    """What ``run --json`` prints of a figure scene."""
    return {
        "scene": scene.id,
        "figure": scene.figure,
        "values": result.values,
        "quoted": result.quoted,
        "unconfirmed": result.unconfirmed,
        "failures": [str(f) for f in check_values(scene, result)],
    }


def figure_schema() -> dict[str, Any]:
    """The JSON Schema of a figure scene's file: what `parameters` may have depends on the kind."""
    schema = FigureScene.model_json_schema()
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    choices = []
    for name, kind in KINDS.items():
        parameters = kind.parameters.model_json_schema()
        definitions.update({f"{name}.{key}": value for key, value in parameters.pop("$defs", {}).items()})
        definitions[f"{name}.parameters"] = _renamed(parameters, name)
        choices.append({"if": {"properties": {"figure": {"const": name}}}, "then": {"properties": {"parameters": {"$ref": f"#/$defs/{name}.parameters"}}}})
    for key in [k for k in definitions if "." in k]:
        definitions[key] = _renamed(definitions[key], key.split(".", 1)[0])
    schema["properties"]["figure"] |= {"enum": list(KINDS), "description": "; ".join(f"{name}: {kind.says}" for name, kind in KINDS.items())}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "allOf": choices}


def _renamed(part: Any, kind: str) -> Any:
    """References inside a kind's parameters, now that its definitions bear the kind's name."""
    if isinstance(part, dict):
        return {k: _reference(v, kind) if k == "$ref" else _renamed(v, kind) for k, v in part.items()}
    return [_renamed(entry, kind) for entry in part] if isinstance(part, list) else part


def _reference(target: str, kind: str) -> str:
    name = target.removeprefix("#/$defs/")
    return target if "." in name else f"#/$defs/{kind}.{name}"


def _text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mark(name: str, result: FigureResult) -> str:
    marks = [f"quoted: {result.quoted[name]}"] if name in result.quoted else []
    marks += [f"unconfirmed: {result.unconfirmed[name]}"] if name in result.unconfirmed else []
    return f"  [{'; '.join(marks)}]" if marks else ""
