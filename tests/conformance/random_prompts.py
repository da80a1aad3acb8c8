"""Prompts of random scenarios: they share prefixes, also up to the middle of a block, and continue what earlier requests produced."""

from __future__ import annotations

from random import Random

from tests.conformance.compare import Json


class Prompts:
    """Draws prompts for one scenario.

    Args:
        length: tokens of the longer prompts.
        limit: no prompt has more tokens than this.
    """

    def __init__(self, random: Random, length: int, limit: int) -> None:
        self.random = random
        self.length = max(1, min(length, limit))
        self.limit = max(1, limit)
        self.stems = [[random.randrange(10) for _ in range(2 * length)] for _ in range(random.choice([1, 2, 2, 3]))]
        self.made: list[list[int]] = []
        self.salted = random.random() < 0.25
        self.adapted = random.random() < 0.2

    def random_length(self) -> int:
        random = self.random
        if random.random() < 0.25:
            return random.randint(1, self.length)
        return random.randint(max(1, self.length // 2), self.length)

    def tokens(self, earlier: list[list[int]]) -> list[int]:
        """A prompt: a stem with a tail of its own, an earlier request gone on with, or the same as an earlier one."""
        random = self.random
        stem = random.choice(self.stems)
        if earlier and random.random() < 0.4:
            stem = random.choice(earlier[-4:])
        kind = random.random()
        if kind < 0.25:
            tokens = stem[: self.random_length()]
        elif kind < 0.5:
            shared = random.randint(0, min(len(stem), self.random_length()))
            tokens = stem[:shared] + self.some(max(1, self.random_length() - shared))
        elif kind < 0.75 or not self.made:
            tokens = stem + self.some(1 + self.length // 4)
        else:  # the whole prompt of another request: its last hash boundary is reached
            tokens = random.choice(self.made[-4:]) + self.some(1 + self.length // 3)
        return tokens[: self.limit] or self.some(1) or [0]

    def some(self, most: int) -> list[int]:
        return [self.random.randrange(10) for _ in range(self.random.randint(0, most))]

    def operation(self, request_id: str, earlier: list[list[int]]) -> tuple[Json, list[int]]:
        """The operation `add`, and the tokens of its prompt."""
        random = self.random
        op: Json = {"op": "add", "id": request_id}
        if random.random() < 0.2:
            op["n"] = min(self.random_length(), self.limit)
            if random.random() < 0.3:
                op["base"] = random.choice([50, 100, op["n"]])
            tokens = list(range(op.get("base", 0), op.get("base", 0) + op["n"]))
        else:
            tokens = op["tokens"] = self.tokens(earlier)
        self.made.append(list(tokens))
        if self.salted and random.random() < 0.5:
            op["salt"] = random.choice(["s", "t"])
        if self.adapted and random.random() < 0.5:
            op["lora"] = random.choice(["L", "M"])
        return op, list(tokens)
