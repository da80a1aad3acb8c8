"""What can happen: one frozen struct per event kind, each with its cause.

The core and the worker make these through an `Emit` callable; `engine.trace.recorder` turns each into a `Frame`; `views.narration` turns each
into a sentence. The causes are in `engine.trace.causes`.

Imports neither torch nor Streamlit. Token ids are ints, never texts: `TraceHeader.vocabulary` has the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from engine.trace.causes import Cause as Cause
from engine.trace.causes import CauseKind as CauseKind
from engine.trace.causes import Fact as Fact
from engine.trace.event import Event as Event
from engine.trace.events_paper import BeamCandidate as BeamCandidate
from engine.trace.events_paper import BeamsChosen as BeamsChosen
from engine.trace.events_paper import BlocksSwappedIn as BlocksSwappedIn
from engine.trace.events_paper import BlocksSwappedOut as BlocksSwappedOut
from engine.trace.events_paper import PrefixKept as PrefixKept
from engine.trace.events_paper import SequenceForked as SequenceForked
from engine.trace.events_worker import AttentionComputed as AttentionComputed
from engine.trace.events_worker import BlocksCopied as BlocksCopied
from engine.trace.events_worker import KVWritten as KVWritten
from engine.trace.events_worker import RowUpdated as RowUpdated
from engine.trace.events_worker import SlotsMapped as SlotsMapped
from engine.trace.events_worker import StateWritten as StateWritten


class TraceStarted(Event, frozen=True, kw_only=True, tag="trace_started"):
    """The fresh pool: `num_blocks` blocks with ids 0..num_blocks-1, of which block 0 is the null block (R1.1)."""

    num_blocks: int
    block_size: int
    group_block_sizes: list[int] = []
    """Tokens per block of each KV-cache group; empty when there is one group of `block_size`."""


class RequestAdded(Event, frozen=True, kw_only=True, tag="request_added"):
    """A request joins the waiting queue, behind `num_ahead` others (None: at the back); its full prompt blocks are hashed at once (R2.5)."""

    num_prompt_tokens: int
    num_block_hashes: int
    num_ahead: int | None = None


class StepStarted(Event, frozen=True, kw_only=True, tag="step_started"):
    """schedule() begins with a fresh token budget (R7.1)."""

    token_budget: int


class BlockStop(msgspec.Struct, frozen=True, omit_defaults=True):
    """One block behind the end of a hit and why it is no part of it. `block_id`: the cached block that cannot be used, None where none is cached."""

    logical_index: int
    cause: Cause
    block_id: int | None = None


class GroupLookup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One group's part in a lookup: how far it could go alone, the blocks it gives (0 where a null block stands), why it has no more, and block by block what
    lies behind (`stops`)."""

    group_id: int
    num_hit_tokens: int
    block_ids: list[int]
    cause: Cause
    stops: list[BlockStop] = []


class PrefixLookup(Event, frozen=True, kw_only=True, tag="prefix_lookup"):
    """get_computed_blocks: pure, changes nothing (R5.1). The cause says where the walk stopped.

    `hit_block_ids`: what would be adopted, in group order, without null blocks. `stops`: what lies behind the hit, with one group. `groups`: the same group by
    group, with several groups. `junction`: the longest hit of a single group when it is longer than the common one, else 0 (R4.5)."""

    num_hit_tokens: int
    hit_block_ids: list[int]
    max_hit_tokens: int
    stops: list[BlockStop] = []
    groups: list[GroupLookup] = []
    junction: int = 0


class AllocationRefused(Event, frozen=True, kw_only=True, tag="allocation_refused"):
    """allocate_slots returned None and changed no table. `at_gate`: refused by the full-sequence gate (R7.4) and not by the step's own need."""

    num_new_tokens: int
    at_gate: bool


class BlocksTouched(Event, frozen=True, kw_only=True, tag="blocks_touched"):
    """Cached blocks are adopted: ref_cnt + 1 each; those in `left_free_queue` had nobody and are unlinked from the queue (R1.6).

    The request's table begins with `num_null_blocks` null blocks, then `block_ids`, among which null blocks stand as 0. `num_cached_block`: the frontier."""

    block_ids: list[int]
    left_free_queue: list[int]
    num_null_blocks: int = 0
    num_cached_block: int | None = None


class BlockEvicted(Event, frozen=True, kw_only=True, tag="block_evicted"):
    """A cached block loses one of its hash keys: because it is about to be handed out again (R1.5; it is still at the head of the free queue), because an
    entry gives way to the full block's (R1.11), or because the scenario says so (R1.13). Of several keys the primary one goes last."""

    block_id: int
    block_hash: str


class BlocksAllocated(Event, frozen=True, kw_only=True, tag="blocks_allocated"):
    """get_new_blocks: popped from the head in this order, ref_cnt 0 -> 1, appended to the request's block table (R1.5)."""

    block_ids: list[int]


class BlockCached(Event, frozen=True, kw_only=True, tag="block_cached"):
    """A block's hash enters the prefix cache (R1.11). `duplicates`: blocks already registered under the same key (never merged, R1.10).

    `num_hash_tokens`: length of the prefix that the key covers; not a multiple of the block size for an entry that ends inside the block (R6.3), and then
    `token_ids` are those of the last hash unit. `num_cached_block`: the request's frontier after the caching call."""

    block_id: int
    block_hash: str
    parent_hash: str | None
    token_ids: list[int]
    duplicates: list[int] = []
    num_hash_tokens: int | None = None
    num_cached_block: int | None = None


class CachingSkipped(Event, frozen=True, kw_only=True, tag="caching_skipped"):
    """Full blocks of the table stay out of the prefix cache: no hit could use them (R3.21). `num_cached_block`: the frontier after the caching call."""

    logical_indices: list[int]
    num_cached_block: int


class RequestAdmitted(Event, frozen=True, kw_only=True, tag="request_admitted"):
    """A waiting request moves to the running list with `num_computed_tokens` tokens already in the cache."""

    num_computed_tokens: int
    resumed: bool = False


class RequestScheduled(Event, frozen=True, kw_only=True, tag="request_scheduled"):
    """The step will compute `num_scheduled_tokens` tokens, from position `num_computed_tokens` on. Prefill and decode differ only by this number (R7.2)."""

    num_scheduled_tokens: int
    num_computed_tokens: int


class RequestPreempted(Event, frozen=True, kw_only=True, tag="request_preempted"):
    """The victim loses its progress, then its blocks, and goes to the front of the waiting queue, behind `num_ahead` that a step passed over (R7.5)."""

    num_lost_tokens: int
    num_ahead: int = 0


class StepScheduled(Event, frozen=True, kw_only=True, tag="step_scheduled"):
    """schedule() is done; num_computed_tokens has moved on before anything ran (R7.1)."""

    num_scheduled_tokens: dict[str, int]
    token_budget_left: int


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
    """Table entries that will never be read again were replaced by the null block and freed in this order (R3.2, R1.7): `prepended`, `appended` and
    `still_referenced` as in BlocksFreed."""

    logical_indices: list[int]
    block_ids: list[int]
    prepended: list[int] = []
    appended: list[int] = []
    still_referenced: list[int] = []


class StateBlocksArranged(Event, frozen=True, kw_only=True, tag="state_blocks_arranged"):
    """A table of recurrent states grows before new blocks are taken (R3.43): null blocks are appended up to `num_blocks` entries, then the blocks at
    `moved_from` go to the end, in this order, and leave null blocks behind."""

    num_blocks: int
    moved_from: list[int] = []


class CopyQueued(Event, frozen=True, kw_only=True, tag="copy_queued"):
    """Copy-on-write (R6.4, R6.5): `destination_block_id` is popped from the head of the queue, the worker will copy `source_block_id` into it, and both are
    held until the end of the step.

    Consumer (cause PARTIAL_HIT): the destination takes the source's place at `logical_index` of the request's table. Producer (cause OWN_BOUNDARY): the
    request keeps the source, all keys of which move to the destination."""

    source_block_id: int
    destination_block_id: int
    logical_index: int


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
    | CachingSkipped
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
    | StateBlocksArranged
    | CopyQueued
    | StateWritten
    | BlocksCopied
    | SequenceForked
    | BeamsChosen
    | PrefixKept
    | BlocksSwappedOut
    | BlocksSwappedIn
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
