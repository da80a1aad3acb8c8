"""What the files of both kinds of scene, those on the stage and figures, have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from scenarios.yaml_source import Source

ID_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
Sentence = Annotated[str, Field(min_length=1, max_length=600)]


class Part(BaseModel):
    """A part of a scene's file: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Scene(Part):
    """What every scene has."""

    id: str = Field(pattern=ID_PATTERN, max_length=60)
    title: Sentence
    source: Sentence

    _source: Source = PrivateAttr(default_factory=lambda: Source("the scene"))
    _group: str | None = PrivateAttr(default=None)

    @property
    def group(self) -> str | None:
        """The folder of the library it comes from, as paper, vllm, limits or bugs. None for a scene of one's own."""
        return self._group

    @property
    def origin(self) -> Source:
        """Where its parts stand in its file."""
        return self._source
