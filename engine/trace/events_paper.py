"""What happens in the paper's engine only: forks, beams, kept prefixes, swapping. `engine.trace.events` has all kinds together."""

from __future__ import annotations

import msgspec

from engine.trace.event import Event


class SequenceForked(Event, frozen=True, kw_only=True, tag="sequence_forked"):
    """The paper's fork (section 5.2): `request_id`, a new sequence, gets the block table of `parent_id`; every block of it has one reference more, the partial
    last one included. No key or value is copied."""

    parent_id: str
    block_ids: list[int]


class BeamCandidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation: `parent_id` followed by `token_id`. `cumulative_logprob`: of all outputs, natural logarithm, None where no model ran.
    `sequence_id`: the sequence that goes on as this candidate, None when it is dropped. `finished`: it ends here with a stop token."""

    parent_id: str
    token_id: int
    cumulative_logprob: float | None = None
    sequence_id: str | None = None
    finished: bool = False
    forced: bool = False


class BeamsChosen(Event, frozen=True, kw_only=True, tag="beams_chosen"):
    """Beam search (section 4.4): all candidates of sequence group `request_id`, best first; the first `beam_width` that do not end go on. Forks and frees
    follow as events of their own."""

    beam_width: int
    candidates: list[BeamCandidate]


class PrefixKept(Event, frozen=True, kw_only=True, tag="prefix_kept"):
    """The provider's prefix `request_id` is computed and its blocks stay (section 4.4, shared prefix), whoever comes and goes."""

    block_ids: list[int]


class BlocksSwappedOut(Event, frozen=True, kw_only=True, tag="blocks_swapped_out"):
    """Swapping (section 4.5): the pages of the sequence group `request_id` are copied to CPU memory, `gpu_block_ids[i]` to `cpu_block_ids[i]`, each shared
    block once, and the GPU's blocks are free again: `prepended`, in this order, at the head of the free queue; `still_referenced` are held by others too
    and stay. No kernel makes these copies, so there is no witness of them."""

    gpu_block_ids: list[int]
    cpu_block_ids: list[int]
    prepended: list[int]
    still_referenced: list[int] = []


class BlocksSwappedIn(Event, frozen=True, kw_only=True, tag="blocks_swapped_in"):
    """The way back: `cpu_block_ids[i]` to `gpu_block_ids[i]`, which were popped from the head of the free queue in this order; sharing is as it was before.
    `shared_again`: full blocks of a provider's prefix, which never left and which every sequence of the group refers to again."""

    cpu_block_ids: list[int]
    gpu_block_ids: list[int]
    shared_again: list[int] = []
