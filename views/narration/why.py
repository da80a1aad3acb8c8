"""The type of a reason: from the frame's words, the event and its facts to one or two sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from views.narration.stops import Facts
from views.narration.words import Words

Why: TypeAlias = Callable[[Words, Any, Facts], str]
