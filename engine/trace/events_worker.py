"""What happens at the worker: rows, slots, keys and values, states, attention, copies. `engine.trace.events` has all kinds together."""

from __future__ import annotations

from engine.trace.event import Event
from engine.trace.witness import LaunchWitness, MappingWitness


class RowUpdated(Event, frozen=True, kw_only=True, tag="row_updated"):
    """The worker's block table (R8.2): `block_ids` written to `row` from column `start`; an emptied row has no ids."""

    row: int
    start: int
    block_ids: list[int]


class SlotsMapped(Event, frozen=True, kw_only=True, tag="slots_mapped"):
    """compute_slot_mapping for one request of the batch: `positions[i]` of the request goes to physical slot `slots[i]` (R8.4)."""

    positions: list[int]
    slots: list[int]
    token_ids: list[int]


class KVWritten(Event, frozen=True, kw_only=True, tag="kv_written"):
    """reshape_and_cache wrote one key and one value vector per layer and KV head into each of `slots`."""

    slots: list[int]
    token_ids: list[int]
    num_layers: int
    backend: str


class AttentionComputed(Event, frozen=True, kw_only=True, tag="attention_computed"):
    """paged_attention ran over the whole ragged batch. `agrees_within`: the smallest power of ten that bounds the largest difference
    between the Triton kernel and the torch reference on the compared layers (None: nothing was compared). `block_shares`: where the settings ask for it, per
    request the share of attention that its last query gives to each logical block (mean over the heads of `shares_layer`, each row sums to 1) and
    `head_shares`, the same for each query head; with several groups `group_id` is that layer's. `witness`: what the kernels' programs were seen to do, where
    the settings ask for it; None also where no kernel but the torch reference ran. `mapping_witness`: the same of the kernels that mapped the batch's slots,
    one per group. `slot_mappings`: with several groups and a witness, what each group's slot mapping says, which is what its kernels were told."""

    backend: str
    layers: list[int]
    agrees_within: float | None
    query_lens: list[int]
    seq_lens: list[int]
    request_ids: list[str]
    block_shares: list[list[float]] = []
    shares_layer: int | None = None
    head_shares: list[list[list[float]]] = []
    witness: list[LaunchWitness] | None = None
    mapping_witness: list[MappingWitness] = []
    slot_mappings: dict[int, list[int]] = {}


class StateWritten(Event, frozen=True, kw_only=True, tag="state_written"):
    """The recurrent state after the first `num_tokens` tokens of the request now lies in `block_id`, over whatever state was there.

    It was computed from the state after `num_source_tokens` tokens, read from `source_block_id` (None: from nothing, at the start of the request), over the
    tokens between the two, in `num_layers` layers (0, with `backend` “none”: only the books were kept). Of several states that one step leaves behind, each
    grows out of the one before, which the step itself has just left there (R3.42)."""

    block_id: int
    num_tokens: int
    source_block_id: int | None = None
    num_source_tokens: int = 0
    num_layers: int = 0
    backend: str = "none"


class BlocksCopied(Event, frozen=True, kw_only=True, tag="blocks_copied"):
    """copy_blocks: whole pages of all layers, all sources read before any destination is written (R6.7). `witness`: as in AttentionComputed."""

    source_block_ids: list[int]
    destination_block_ids: list[int]
    witness: list[LaunchWitness] | None = None
