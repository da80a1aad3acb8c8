"""What it takes to say one kind of event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from views.narration.words import Words


class Sentence(NamedTuple):
    """How to say one kind of event. `symbol` and `rule` may depend on the event: one kind may stand for several of vLLM's operations."""

    say: Callable[[Words, Any], str]
    symbol: str | Callable[[Words, Any], str]
    rule: str | Callable[[Words, Any], str]

    def symbol_of(self, words: Words, event: Any) -> str:
        """vLLM's dotted name for what this event is."""
        return self.symbol if isinstance(self.symbol, str) else self.symbol(words, event)

    def rule_of(self, words: Words, event: Any) -> str:
        """The number of the rule of V1's behaviour that the event follows."""
        return self.rule if isinstance(self.rule, str) else self.rule(words, event)
