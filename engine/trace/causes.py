"""Why something happened: an enum and the numbers that belong to it.

Causes are data, never prose, so that they can be tested, translated and asked about. `views.narration` turns each into a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    TOKEN_DIFFERS = "token_differs"  # facts: logical_index, position, token_id, other_token_id, other_request
    EXTRA_KEYS_DIFFER = "extra_keys_differ"  # same tokens under other extra keys; facts: logical_index, other_request
    PARENT_MISSING = "parent_missing"  # a block further left is not cached; facts: logical_index
    EVICTED_EARLIER = "evicted_earlier"  # facts: logical_index, num_tokens, step, for_request
    ALIGNMENT = "alignment"  # hits are multiples of this many tokens; facts: alignment_tokens, num_cached_tokens
    WINDOW_TAIL = "window_tail"  # no run of cached blocks is long enough to fill the window; facts: num_needed, num_found
    NO_STATE = "no_state"  # no recurrent state is cached below the limit; facts: max_hit_tokens
    CHUNK_START = "chunk_start"  # blocks before the current chunk are hits without being looked up; facts: num_tokens
    SHORTENED_BY_GROUP = "shortened_by_group"  # facts: by_group, num_hit_tokens
    EAGLE_DROP = "eagle_drop"  # the draft head needs the last matched block recomputed; facts: num_dropped_tokens
    NOT_USED = "not_used"  # cached, but no hit can end behind this block; facts: logical_index
    NOT_SHARED = "not_shared"  # encoder states are never shared between requests
    # hashing
    BLOCK_FULL = "block_full"  # facts: logical_index, num_tokens (prefix length the hash covers)
    PROMPT_BOUNDARY = "prompt_boundary"  # the prompt's last hash boundary, inside a block (R6.3); facts: logical_index, num_tokens
    NOT_REACHABLE = "not_reachable"  # no hit could ever use these blocks (R3.21); facts: num_needed (blocks at each boundary)
    NULL_BLOCK = "null_block"  # nothing there to register
    # eviction
    REALLOCATED = "reallocated"  # a cached block reached the head and is taken; facts: for_request
    PROMOTED = "promoted"  # an entry that ended inside the block gives way to the full block's; facts: logical_index, num_tokens
    # frees
    REQUEST_FINISHED = "request_finished"  # facts: reason
    PREEMPTED = "preempted"
    PREPARED = "prepared"  # the scenario arranges the free queue before the first request (rule S24)
    OUTSIDE_WINDOW = "outside_window"  # facts: num_skipped_tokens
    STATE_SUPERSEDED = "state_superseded"  # a newer recurrent state exists; facts: logical_index
    COPY_QUEUED = "copy_queued"  # the step's plan names the copy: the worker makes it before it writes, so both ends are let go at once (R6.6)
    # copy-on-write (R6)
    PARTIAL_HIT = "partial_hit"  # the hit ends inside a shared block; facts: logical_index, num_hit_tokens
    OWN_BOUNDARY = "own_boundary"  # the request goes on writing into the block that it registered; facts: logical_index, num_tokens
    # tables
    ONE_STATE = "one_state"  # only the last state is kept, earlier places stay null (R3.43); facts: num_speculative_blocks
    # scheduling
    DECODE = "decode"  # one token is not yet computed; facts: num_new_tokens
    PREFILL = "prefill"  # all that is left of the prompt fits; facts: num_new_tokens
    CHUNKED_BY_BUDGET = "chunked_by_budget"  # facts: num_wanted, num_new_tokens, token_budget
    CHUNKED_BY_THRESHOLD = "chunked_by_threshold"  # facts: num_wanted, num_new_tokens, threshold
    CHUNKED_AT_BLOCK = "chunked_at_block"  # a recurrent state is kept at block ends only (R3.44); facts: num_wanted, num_new_tokens, block_size
    CHUNKED_AT_PROMPT_BOUNDARY = "chunked_at_prompt_boundary"  # facts: num_wanted, num_new_tokens, num_tokens
    CHUNKED_AT_JUNCTION = "chunked_at_junction"  # where another group's longer hit ended (R4.5); facts: num_wanted, num_new_tokens, num_tokens
    STATE_NOT_WRITTEN = "state_not_written"  # the hit state is registered, but this step writes it (R3.41); facts: num_hit_tokens
    FCFS_HEAD = "fcfs_head"  # first in the waiting queue and it fits; facts: num_required, num_free
    PRIORITY_HEAD = "priority_head"  # smallest priority among the waiting and it fits; facts: num_required, num_free, priority
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
    # the paper's engine (sections 4.3 to 4.5)
    SHARED_BLOCK_WRITTEN = "shared_block_written"  # copy-on-write: others refer to the block too; facts: logical_index, ref_cnt (before)
    PARALLEL_SAMPLING = "parallel_sampling"  # the prompt is computed, its samples go apart from here; facts: num_samples
    BEAM_SURVIVES = "beam_survives"  # facts: rank (from 0), beam_width
    BEAM_DROPPED = "beam_dropped"  # no candidate of this sequence is among the best; facts: beam_width
    BEAM_SEARCH = "beam_search"  # the best candidates of all sequences of the group go on; facts: beam_width, num_candidates
    SHARED_PREFIX = "shared_prefix"  # the prompt begins with a prefix that the provider keeps; facts: prefix, num_tokens
    PREFIX_KEPT = "prefix_kept"  # the provider keeps a prefix from now on; facts: num_tokens
    ONE_BLOCK_PER_SEQUENCE = "one_block_per_sequence"  # facts: num_sequences, num_required, num_free
    SWAPPED = "swapped"  # a preempted group's blocks go to CPU memory, all or nothing; facts: num_blocks, num_cpu_free (before)
    SWAPPED_BACK = "swapped_back"  # facts: num_blocks, num_free (before)
    RECOMPUTED = "recomputed"  # a preempted group's blocks are dropped and computed again later, prompt and outputs as one prompt; facts: num_tokens
    SAME_TOKENS = "same_tokens"  # a recomputed group's sequences share again the full blocks that hold the same tokens; facts: other (a sequence), num_tokens
    SWAP_SPACE_EXHAUSTED = "swap_space_exhausted"  # the CPU pool cannot hold the group, so it is recomputed; facts: num_blocks, num_cpu_free
    PREEMPTED_FIRST = "preempted_first"  # nothing new is admitted while preempted groups wait to come back; facts: num_swapped
    PROMPT_TOO_LONG_FOR_STEP = "prompt_too_long_for_step"  # a prompt is computed in one piece; facts: num_tokens, token_budget
    # ends
    MAX_TOKENS = "max_tokens"  # facts: max_tokens
    STOP_TOKEN = "stop_token"  # facts: token_id
    BEAMS_FINISHED = "beams_finished"  # no running beam can become better than the finished ones; facts: num_finished
    MAX_MODEL_LEN = "max_model_len"  # facts: max_model_len
    ERROR = "error"
    RECORDER_FULL = "recorder_full"  # facts: max_frames


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why. `facts` holds plain numbers and ids, named in the comment beside each `CauseKind`."""

    kind: CauseKind
    facts: dict[str, Fact] = {}
