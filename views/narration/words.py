"""Small pieces of English that the sentences are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from engine.trace.frame import BlockState, Frame, RequestState, TraceHeader
from views.narration.groups import Group, groups_of, hash_block_size_of

PAGES = "Whole pages move, whatever is in them. All sources are read before any destination is written."
"""About copies, in every place that tells why there is one (R6.7)."""

MAX_LISTED = 6
"""Longer lists are cut with “… and 12 more”: a sentence must stay readable on one line."""


class Words:
    """The vocabulary of one frame: token texts, blocks and requests by name. Never changes the frame."""

    def __init__(self, header: TraceHeader, frame: Frame, previous: Frame | None) -> None:
        self.header = header
        self.frame = frame
        self.previous = previous
        self.num_ranks = int(header.config.get("decode_context_parallel_size") or 1)

    @property
    def is_paper(self) -> bool:
        """Whether the run is one of the paper's engine: no null block, no hashes, sequence groups."""
        return self.header.config.get("engine") == "paper"

    @property
    def is_caching(self) -> bool:
        """Whether prefix caching is on, so that full blocks bear hashes."""
        return self.header.config.get("enable_prefix_caching") is not False

    @cached_property
    def groups(self) -> list[Group]:
        """The KV-cache groups of the run."""
        return groups_of(self.header)

    @cached_property
    def hash_block_size(self) -> int:
        """Tokens per prefix hash."""
        return hash_block_size_of(self.header)

    def group(self, group_id: object) -> Group:
        """A KV-cache group of the run; the first one for an event that belongs to none."""
        return self.groups[group_id] if isinstance(group_id, int) and 0 <= group_id < len(self.groups) else self.groups[0]

    def block_size(self, group_id: object) -> int:
        """Tokens that one entry of the group's block table stands for, on all ranks together (R4.8)."""
        group = self.group(group_id)
        return group.block_size * (1 if group.is_state else self.num_ranks)

    def for_group(self, group_id: object) -> str:
        """“ for window 8”, “ for full attention”, or nothing where there is only one group or the event belongs to none."""
        return f" for {self.group(group_id).noun}" if len(self.groups) > 1 and isinstance(group_id, int) else ""

    def token(self, token_id: object) -> str:
        """The token's text in quotation marks; its number where the header has no text for it."""
        text = self.header.vocabulary.get(token_id) if isinstance(token_id, int) else None
        if text is None:
            return f"token {token_id}"
        return f"“{visible(text)}”"

    def tokens(self, token_ids: Sequence[int]) -> str:
        """Several tokens as one quotation."""
        texts = [visible(self.header.vocabulary.get(t, f"#{t}")) for t in token_ids]
        if len(texts) > MAX_LISTED:
            texts = [*texts[: MAX_LISTED - 1], "…", texts[-1]]
        return "“" + " ".join(texts) + "”"

    def request(self, request_id: str | None) -> RequestState | None:
        """The state of a request in this frame."""
        return self.frame.request(request_id) if request_id else None

    def request_before(self, request_id: str | None) -> RequestState | None:
        """The state of a request in the frame before."""
        return self.previous.request(request_id) if self.previous and request_id else None

    def group_name(self, request_id: str | None) -> str | None:
        """The sequence group that a sequence belongs to; a group's own name and a request that is one sequence stay what they are."""
        request = self.request(request_id)
        return request.sequence_group or request_id if request is not None else request_id

    def sequences(self, request_id: str | None) -> list[RequestState]:
        """The sequences of a sequence group in this frame, in order of birth; the group may be named by one of them."""
        name = self.group_name(request_id)
        return [r for r in self.frame.requests if (r.sequence_group or r.request_id) == name]

    def asked(self, request_id: str | None) -> Mapping[str, Any]:
        """What the scenario says about a request or about the request that a sequence belongs to, empty where it says nothing."""
        name, said = self.group_name(request_id), self.header.scenario.get("requests")
        parts = said if isinstance(said, list) else []
        return next((part for part in parts if isinstance(part, Mapping) and part.get("id") == name), {})

    def is_prefix(self, request_id: str | None) -> bool:
        """Whether it is a prefix that the provider keeps (section 4.4)."""
        prefixes = self.header.scenario.get("prefixes")
        named = {part.get("id") for part in prefixes if isinstance(part, Mapping)} if isinstance(prefixes, list) else set()
        return request_id in named or any(r.status == "PREFIX_KEPT" for r in self.sequences(request_id))

    def called(self, request_id: str | None) -> str:
        """A request or sequence in a sentence: a prefix is called one."""
        if not self.is_prefix(request_id):
            return str(request_id)
        return "the prefix" if str(request_id).lower() == "prefix" else f"prefix {request_id}"

    def block_before(self, block_id: int) -> BlockState | None:
        """The state of a physical block in the frame before."""
        blocks = self.previous.blocks if self.previous else ()
        return blocks[block_id] if 0 <= block_id < len(blocks) else None

    def block(self, block_id: int) -> BlockState | None:
        """The state of a physical block in this frame."""
        return self.frame.blocks[block_id] if 0 <= block_id < len(self.frame.blocks) else None


def visible(text: str) -> str:
    """A token's text so that blanks and line breaks can be seen."""
    stripped = text.strip(" ")
    if not stripped:
        return "␣" * len(text) if text else "∅"
    return stripped.replace("\n", "⏎").replace("\t", "⇥")


def count(number: object, singular: str, plural: str | None = None) -> str:
    """“1 block”, “3 blocks”."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def listed(items: Iterable[object]) -> str:
    """“7”, “7 and 1”, “7, 1 and 3”, long lists cut in the middle."""
    texts = [str(i) for i in items]
    if len(texts) > MAX_LISTED:
        hidden = len(texts) - MAX_LISTED + 1
        return ", ".join(texts[: MAX_LISTED - 1]) + f" and {hidden} more"
    if len(texts) < 2:
        return "".join(texts)
    return ", ".join(texts[:-1]) + " and " + texts[-1]


def blocks(block_ids: Sequence[int]) -> str:
    """“block 3”, “blocks 7 and 1”."""
    if not block_ids:
        return "no block"
    texts = [str(block_id) if block_id else "null" for block_id in block_ids]
    return f"block {texts[0]}" if len(texts) == 1 else f"blocks {listed(texts)}"


def physical(block_ids: Sequence[int]) -> str:
    """As `blocks`, where there is no null block: “blocks 0 and 3”."""
    return f"{'block' if len(block_ids) == 1 else 'blocks'} {listed(block_ids)}" if block_ids else "no block"


def capital(text: str) -> str:
    """With a capital letter in front; the rest stays."""
    return text[:1].upper() + text[1:]


def slots(numbers: Sequence[int]) -> str:
    """“slot 12”, “slots 28 to 31”, “slots 28 to 31 and 4 to 6”: runs of neighbours are joined."""
    return f"{'slot' if len(numbers) == 1 else 'slots'} {listed(_runs(numbers))}"


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a} to {b}" for a, b in runs]


def real(block_ids: Iterable[int]) -> list[int]:
    """Block ids without the null block, which stands for “skipped”."""
    return [block_id for block_id in block_ids if block_id]


def places(indices: Sequence[int]) -> str:
    """“logical block 3”, “logical blocks 0 to 4”: in ascending order, runs of neighbours joined."""
    if not indices:
        return "no logical block"
    return f"logical block{'' if len(indices) == 1 else 's'} {ranges(sorted(indices))}"


def ranges(numbers: Sequence[int]) -> str:
    """“3”, “1 and 2”, “0 to 4, 7 and 9”: as they stand, runs of three and more neighbours joined."""
    items: list[str] = []
    for run in _runs(numbers):
        first, _, last = run.partition(" to ")
        items += [first, last] if last and int(last) == int(first) + 1 else [run]
    return listed(items)


def power_of_ten(value: float) -> str:
    """“10⁻⁶”, as it stands in textbooks."""
    exponent = int(f"{value:.0e}".split("e")[1])
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def percent(probability: object) -> str:
    """“93 %”; near certainty is not rounded up to it."""
    if not isinstance(probability, int | float):
        return "an unknown probability"
    value = 100 * probability
    if 99.9 <= value < 100:
        return "over 99.9 %"
    return f"{value:.1f} %" if value < 10 or 99 <= value < 100 else f"{value:.0f} %"
