"""What the parts of the kernels screen draw: a close-up, with the words of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.trace.closeup import KernelCloseup, LaunchCloseup, TableRow
from engine.trace.frame import Frame
from views.figures.kernel_style import request_colours, short_name
from views.screens.kernels_choice import Choices

NAMES = {
    "slot_mapping_kernel": "slot mapping",
    "reshape_and_cache_kernel": "KV write",
    "paged_attention_kernel": "attention",
    "reduce_splits_kernel": "merging splits",
    "copy_pages_kernel": "page copy",
}


class BatchToken(NamedTuple):
    """One token of the batch: whose it is, where it stands in its request, and its text ("" where the trace has none)."""

    request_id: str
    position: int
    text: str

    @property
    def name(self) -> str:
        """“A 7”."""
        return f"{short_name(self.request_id)} {self.position}"


@dataclass(frozen=True)
class View:
    """`as_gpu`: whether `launches` have the programs of a GPU, or those of the run itself. `agrees_within`: what the run's own check found, with its layers."""

    closeup: KernelCloseup
    as_gpu: bool
    choices: Choices
    colours: Mapping[str, str]
    tokens: list[BatchToken]
    agrees_within: float | None
    compared_layers: list[int]

    @property
    def launches(self) -> list[LaunchCloseup]:
        """The launches that were chosen, in the order in which they ran."""
        return self.closeup.gpu if self.as_gpu else self.closeup.interpreted

    def launch(self, kernel: str) -> LaunchCloseup | None:
        """The first launch of a kernel, if there is one."""
        return next((launch for launch in self.launches if launch.kernel == kernel), None)

    def row_of(self, token: int) -> TableRow:
        """The row of the block table of a token of the batch."""
        return next(row for row in self.closeup.table if row.tokens[0] <= token < row.tokens[1])

    def slot_of(self, token: int) -> int:
        """What the slot-mapping kernel found for a token of the batch."""
        row = self.row_of(token)
        return row.slots[token - row.tokens[0]]


def view_of(
    closeup: KernelCloseup, frame: Frame, vocabulary: Mapping[int, str], as_gpu: bool, choices: Choices, agrees_within: float | None, compared: list[int]
) -> View:
    """`frame`: of the step's attention, when the batch's tokens are known."""
    ids = {request.request_id: request.token_ids for request in frame.requests}
    tokens = []
    for row in closeup.table:
        known = ids.get(row.request_id, ())
        for place in range(row.tokens[1] - row.tokens[0]):
            position = row.first_position + place
            text = vocabulary.get(known[position], "") if position < len(known) else ""
            tokens.append(BatchToken(row.request_id, position, text))
    colours = request_colours(list(ids) or [row.request_id for row in closeup.table])
    return View(closeup, as_gpu, choices, colours, tokens, agrees_within, compared)
