"""What can happen: one frozen struct per event kind, each with its cause.

The core and the worker make these through an `Emit` callable; `engine.trace.recorder` turns each into a `Frame`; `views.narration` turns each
into a sentence. Causes are data (an enum plus facts), never prose, so that they can be tested, translated and asked about.

Imports neither torch nor Streamlit. Token ids are ints, never texts: `TraceHeader.vocabulary` has the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias

import msgspec

Fact: TypeAlias = int | float | str | bool | Sequence[int | str] | None


class CauseKind(str, Enum):
    """Why something happened. The comment names the facts that travel with it."""

    # the run itself
    SCENARIO = "scenario"  # the scenario says so; facts: what ("arrival" | "prepare" | "abort" | "reset")
    NEXT_STEP = "next_step"  # the engine loop goes round; facts: num_running, num_waiting
    # blocks taken
    HEAD_OF_FREE_QUEUE = "head_of_free_queue"  # facts: num_tokens (slots that must exist), num_required (blocks), num_held (before), num_free (before)
    # blocks adopted
    PREFIX_CACHE_HIT = "prefix_cache_hit"  # facts: num_hit_tokens, num_from_queue
    # lookups: where the walk stopped
    CACHING_DISABLED = "caching_disabled"
    NOT_CACHED = "not_cached"  # facts: logical_index (first block that is not in the map), num_tokens (prefix length asked for)
    PREFIX_TOO_SHORT = "prefix_too_short"  # no full block at all below the limit; facts: num_tokens, block_size
    BLOCK_NOT_FULL = "block_not_full"  # facts: logical_index, num_filled, block_size
    LAST_TOKEN_RULE = "last_token_rule"  # the next block is full and may be cached, but one token must run; facts: logical_index, max_hit_tokens
    # hashing
    BLOCK_FULL = "block_full"  # facts: logical_index, num_tokens (prefix length the hash covers)
    # eviction
    REALLOCATED = "reallocated"  # a cached block reached the head and is taken; facts: for_request
    # frees
    REQUEST_FINISHED = "request_finished"  # facts: reason
    PREEMPTED = "preempted"
    PREPARED = "prepared"  # the scenario arranges the free queue before the first request (rule S24)
    OUTSIDE_WINDOW = "outside_window"  # facts: num_skipped_tokens
    # scheduling
    DECODE = "decode"  # one token is not yet computed; facts: num_new_tokens
    PREFILL = "prefill"  # all that is left of the prompt fits; facts: num_new_tokens
    CHUNKED_BY_BUDGET = "chunked_by_budget"  # facts: num_wanted, num_new_tokens, token_budget
    CHUNKED_BY_THRESHOLD = "chunked_by_threshold"  # facts: num_wanted, num_new_tokens, threshold
    FCFS_HEAD = "fcfs_head"  # first in the waiting queue and it fits; facts: num_required, num_free
    INSUFFICIENT_BLOCKS = "insufficient_blocks"  # facts: num_required (new blocks), num_evictable_hits, num_watermark, num_free, num_reserved
    LAST_RUNNING = "last_running"  # victim: last of the running list; facts: for_request
    LOWEST_PRIORITY = "lowest_priority"  # facts: for_request, priority
    # the worker
    ADDED_TO_BATCH = "added_to_batch"  # a row is written from the start
    APPENDED = "appended"  # new block ids go behind the row's current length
    LEFT_BATCH = "left_batch"  # the request finished or was preempted, its row is cleared
    BLOCK_TABLE_LOOKUP = "block_table_lookup"  # slot = row[position // block_size] * block_size + position % block_size
    SLOT_MAPPING = "slot_mapping"  # keys and values go where the slot mapping says
    COMPARED_WITH_REFERENCE = "compared_with_reference"  # facts: layer
    GREEDY = "greedy"  # the most probable token; facts: probability
    SEEDED = "seeded"  # drawn with the request's seed; facts: probability, temperature, seed
    FORCED = "forced"  # the scenario dictates it; facts: model_token_id (what the model would have said)
    # ends
    MAX_TOKENS = "max_tokens"  # facts: max_tokens
    STOP_TOKEN = "stop_token"  # facts: token_id
    MAX_MODEL_LEN = "max_model_len"  # facts: max_model_len
    ERROR = "error"
    RECORDER_FULL = "recorder_full"  # facts: max_frames


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why. `facts` holds plain numbers and ids, named in the comment beside each `CauseKind`."""

    kind: CauseKind
    facts: dict[str, Fact] = {}


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all events. `request_id` and `group_id` are None where the event belongs to no single request or KV-cache group."""

    cause: Cause
    request_id: str | None = None
    group_id: int | None = None


class TraceStarted(Event, frozen=True, kw_only=True, tag="trace_started"):
    """The fresh pool: `num_blocks` blocks with ids 0..num_blocks-1, of which block 0 is the null block (R1.1)."""

    num_blocks: int
    block_size: int


class RequestAdded(Event, frozen=True, kw_only=True, tag="request_added"):
    """A request joins the back of the waiting queue; its full prompt blocks are hashed at once (R2.5)."""

    num_prompt_tokens: int
    num_block_hashes: int


class StepStarted(Event, frozen=True, kw_only=True, tag="step_started"):
    """schedule() begins with a fresh token budget (R7.1)."""

    token_budget: int


class PrefixLookup(Event, frozen=True, kw_only=True, tag="prefix_lookup"):
    """get_computed_blocks: pure, changes nothing (R5.1). The cause says where the walk stopped."""

    num_hit_tokens: int
    hit_block_ids: list[int]
    max_hit_tokens: int


class AllocationRefused(Event, frozen=True, kw_only=True, tag="allocation_refused"):
    """allocate_slots returned None and changed no table. `at_gate`: refused by the full-sequence gate (R7.4) and not by the step's own need."""

    num_new_tokens: int
    at_gate: bool


class BlocksTouched(Event, frozen=True, kw_only=True, tag="blocks_touched"):
    """Cached blocks are adopted: ref_cnt + 1 each; those in `left_free_queue` had nobody and are unlinked from the queue (R1.6)."""

    block_ids: list[int]
    left_free_queue: list[int]


class BlockEvicted(Event, frozen=True, kw_only=True, tag="block_evicted"):
    """A cached block loses its hash because it is about to be handed out again (R1.5). It is still at the head of the free queue."""

    block_id: int
    block_hash: str


class BlocksAllocated(Event, frozen=True, kw_only=True, tag="blocks_allocated"):
    """get_new_blocks: popped from the head in this order, ref_cnt 0 -> 1, appended to the request's block table (R1.5)."""

    block_ids: list[int]


class BlockCached(Event, frozen=True, kw_only=True, tag="block_cached"):
    """A full block's hash enters the prefix cache (R1.11). `duplicates`: blocks already registered under the same key (never merged, R1.10)."""

    block_id: int
    block_hash: str
    parent_hash: str | None
    token_ids: list[int]
    duplicates: list[int] = []


class RequestAdmitted(Event, frozen=True, kw_only=True, tag="request_admitted"):
    """A waiting request moves to the running list with `num_computed_tokens` tokens already in the cache."""

    num_computed_tokens: int
    resumed: bool = False


class RequestScheduled(Event, frozen=True, kw_only=True, tag="request_scheduled"):
    """The step will compute `num_scheduled_tokens` tokens, from position `num_computed_tokens` on. Prefill and decode differ only by this number (R7.2)."""

    num_scheduled_tokens: int
    num_computed_tokens: int


class RequestPreempted(Event, frozen=True, kw_only=True, tag="request_preempted"):
    """The victim loses its blocks and its progress and goes to the front of the waiting queue (R7.5)."""

    num_lost_tokens: int


class StepScheduled(Event, frozen=True, kw_only=True, tag="step_scheduled"):
    """schedule() is done; num_computed_tokens has moved on before anything ran (R7.1)."""

    num_scheduled_tokens: dict[str, int]
    token_budget_left: int


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
    between the Triton kernel and the torch reference on the compared layers (None: nothing was compared)."""

    backend: str
    layers: list[int]
    agrees_within: float | None
    query_lens: list[int]
    seq_lens: list[int]
    request_ids: list[str]


class TokenSampled(Event, frozen=True, kw_only=True, tag="token_sampled"):
    """A token is appended to the request (R7.8). Its key and value do not exist yet: they are written by the step that computes it (R7.7)."""

    token_id: int
    position: int
    num_block_hashes: int


class RequestFinished(Event, frozen=True, kw_only=True, tag="request_finished"):
    """The request is done; its blocks are freed by the event that follows."""

    reason: str


class BlocksFreed(Event, frozen=True, kw_only=True, tag="blocks_freed"):
    """free_blocks (R1.7) in the order of `block_ids`: `prepended` (no hash) are now at the head in this order, `appended` (hashed) at the tail,
    `still_referenced` are held by others."""

    block_ids: list[int]
    prepended: list[int]
    appended: list[int]
    still_referenced: list[int]


class BlocksSkipped(Event, frozen=True, kw_only=True, tag="blocks_skipped"):
    """Table entries that attention will never read again were replaced by the null block (R3.2)."""

    logical_indices: list[int]
    block_ids: list[int]


class BlocksCopied(Event, frozen=True, kw_only=True, tag="blocks_copied"):
    """copy_blocks: whole pages of all layers, all sources read before any destination is written (R6.7)."""

    source_block_ids: list[int]
    destination_block_ids: list[int]


class PrefixCacheReset(Event, frozen=True, kw_only=True, tag="prefix_cache_reset"):
    """reset_prefix_cache (R1.14): refused (`ok` False) while any block but the null block is in use."""

    ok: bool


class EngineFailed(Event, frozen=True, kw_only=True, tag="engine_failed"):
    """The last frame of a run that raised: one sentence; all frames before it stay browsable."""

    message: str


class RecordingStopped(Event, frozen=True, kw_only=True, tag="recording_stopped"):
    """The recorder is full: nothing after this frame is in the trace."""

    num_frames: int


AnyEvent: TypeAlias = (
    TraceStarted
    | RequestAdded
    | StepStarted
    | PrefixLookup
    | AllocationRefused
    | BlocksTouched
    | BlockEvicted
    | BlocksAllocated
    | BlockCached
    | RequestAdmitted
    | RequestScheduled
    | RequestPreempted
    | StepScheduled
    | RowUpdated
    | SlotsMapped
    | KVWritten
    | AttentionComputed
    | TokenSampled
    | RequestFinished
    | BlocksFreed
    | BlocksSkipped
    | BlocksCopied
    | PrefixCacheReset
    | EngineFailed
    | RecordingStopped
)
EVENT_KINDS: tuple[str, ...] = tuple(str(t.__struct_config__.tag) for t in AnyEvent.__args__)

Emit: TypeAlias = Callable[[Event], None]
"""How the core and the worker report an event. The state must be consistent (every invariant of `engine.trace.integrity` holds) when it is called."""


def kind_of(event: Event) -> str:
    """The event's kind as it stands in files and selectors, e.g. ``blocks_allocated``."""
    return str(type(event).__struct_config__.tag)
