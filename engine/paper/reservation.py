"""How many slots each system sets aside for a request, and what they hold: token states, slots that will be used later, slots that never will (Figure 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import InvalidInput
from engine.paper.workload import WorkloadRequest

System = Literal["orca_max", "orca_pow2", "orca_oracle", "paged"]
CONTIGUOUS_SYSTEMS: tuple[System, ...] = ("orca_max", "orca_pow2", "orca_oracle")
SYSTEMS: tuple[System, ...] = (*CONTIGUOUS_SYSTEMS, "paged")
SYSTEM_NAMES: dict[System, str] = {"orca_max": "Orca (Max)", "orca_pow2": "Orca (Pow2)", "orca_oracle": "Orca (Oracle)", "paged": "vLLM"}
"""The paper's names of its Figure 2."""


@dataclass(frozen=True)
class SlotSplit:
    """What a request's slots hold at a moment. `token_states`: prompt and tokens generated so far; `reserved`: will hold a token later; `internal`: never
    will."""

    token_states: int
    reserved: int
    internal: int


def reserved_slots(system: System, request: WorkloadRequest, max_model_len: int = 2048) -> int:
    """Contiguous slots that a system reserves when it admits the request, before the allocator rounds them (section 6.1).

    Max: the longest sequence that the model takes. Pow2: the prompt and the next power of two of the true output length, which is less than twice as much (an
    output of 25 gets 32), but never beyond `max_model_len`. Oracle: the prompt and exactly the true output. Raises InvalidInput for ``paged``, which
    reserves nothing.
    """
    if system == "orca_max":
        return max_model_len
    if system == "orca_pow2":
        return min(request.prompt_len + (1 << (request.output_len - 1).bit_length()), max_model_len)
    if system == "orca_oracle":
        return request.prompt_len + request.output_len
    raise InvalidInput(f"the system {system} reserves no slots ahead: ask for one of {', '.join(CONTIGUOUS_SYSTEMS)}")


def split_of(request: WorkloadRequest, generated: int, num_slots: int) -> SlotSplit:
    """What `num_slots` reserved slots hold in the iteration that generates output token `generated` (from 1; 0: before the first).

    The token being generated already has its slot, as in Figure 3. Raises InvalidInput for a `generated` beyond the request's outputs, or too few slots.
    """
    if not 0 <= generated <= request.output_len:
        raise InvalidInput(f"request {request.request_id} generates {request.output_len} tokens, so that token {generated} of them cannot be asked for")
    needed = request.prompt_len + request.output_len
    if num_slots < needed:
        raise InvalidInput(f"request {request.request_id} needs {needed} slots in the end, but only {num_slots} are reserved")
    return SlotSplit(request.prompt_len + generated, request.output_len - generated, num_slots - needed)
