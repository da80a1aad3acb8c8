"""What a text that explains vLLM's block tables says, section by section, and where each statement can be seen.

The text is not in the repository; its statements stand here in our words, in its order. `c` names the scene that shows a statement and what proves it there:

- `at` and facts: an expectation of that scene (kind of event, request, nth) which demands these facts, so the engine proves it whenever the scene runs;
- `values`: values that a figure scene computes and demands;
- `told`: words of one of the scene's notes, for what no frame holds, with the `test` that proves it where there is one;
- `errs`: the rule by which the scene corrects the text. What errs is shown as it really is.

`test_claims.py` fails when a scene, an expectation, a note, a correction or a test is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One statement. `at`: ``kind request nth`` of an expectation, as many of them as needed."""

    says: str
    scene: str
    at: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    told: str | None = None
    test: str | None = None
    errs: str | None = None


def c(
    says: str,
    scene: str,
    at: str = "",
    *,
    values: dict[str, Any] | None = None,
    told: str | None = None,
    test: str | None = None,
    errs: str | None = None,
    **facts: Any,
) -> Claim:
    """A claim; facts are named as in a scene's `expect`, and of a group of them those that matter are enough."""
    return Claim(says, scene, at, facts, values or {}, told, test, errs)


_BLOCK_TABLE = "tests/worker/test_block_table.py::"
_SLOTS = "tests/kernels/test_slot_mapping.py::"

CLAIMS: dict[str, list[Claim]] = {
    "In short": [
        c("a block table maps a request's logical blocks to physical ones that need not be neighbours", "figure-6", "kv_written A 3",
          slot={0: 28, 7: 7, 8: 12}),
        c("that is what a page table of an operating system does", "page-table",
          values={"logical_block": 1, "physical_block": 1, "block_offset": 1, "slot": 5}),
        c("one pool hands out physical blocks and counts references to them", "putting-it-together", "row_updated A 2", ref_cnt={7: 1, 1: 1, 3: 1}),
        c("a manager for each kind of attention builds the request's lists", "hybrid-full-and-window", "step_scheduled",
          block_table={"A": [[1, 2, 3, 4], [5, 6, 7, 8]]}),
        c("blocks are shared by raising their counts", "same-prompt-twice", "blocks_touched B", ref_cnt={1: 2}),
        c("cached prefixes are found again by chained hashes", "eviction-order", "prefix_lookup A2", hash_names={1: ["A@4"], 2: ["A@8"]}, num_hit_tokens=8),
        c("the worker gets a compact table of int32 numbers", "slot-mapping-16", told="row of 32-bit numbers",
          test=_BLOCK_TABLE + "test_r8_1_types_and_shapes_and_width_in_kernel_blocks"),
        c("earlier systems hold usable keys and values in as little as 20.4 % of their memory", "figure-2", values={"orca_max.token_states": 20.4}),
        c("a request wastes at most one block", "hybrid-full-and-window", errs="S21"),
        c("what is saved becomes a larger batch", "figure-2", values={"orca_max.mean_batch_size": 7.0, "paged.mean_batch_size": 30.42}),
    ],
    "The big picture": [
        c("a prompt of 7 tokens fills the logical blocks 0 and 1, which lie in the physical blocks 7 and 1", "figure-6", "blocks_allocated A 1",
          block_table={"A": [7, 1]}),
        c("the first block holds 4 tokens, the second 3 with 1 slot free; #filled says so", "figure-6", "kv_written A 1", num_filled={7: 4, 1: 3},
          block_tokens={1: ["years", "ago", "our", None]}),
        c("the first decode step writes into the free slot of block 1", "figure-6", "kv_written A 2", slots=[7], num_filled={1: 4}),
        c("the second one finds it full, so block 3 is allocated and recorded", "figure-6", "blocks_allocated A 2", block_ids=[3],
          block_table={"A": [7, 1, 3]}),
        c("the kernel reads all three blocks", "putting-it-together", "attention_computed * 3", event={"seq_lens": [9], "query_lens": [1]}),
    ],
    "Why it exists": [
        c("earlier systems reserve one contiguous chunk for the longest possible request", "figure-3", values={"A.slots": 2048, "B.slots": 512}),
        c("reserved: slots for tokens to come", "figure-3", values={"A.later": 2, "B.later": 1}),
        c("internal fragmentation: room for a length that never comes, known only afterwards", "figure-3", values={"A.never": 2038, "B.never": 507},
          told="known only when the request has ended"),
        c("external fragmentation: gaps between chunks, never usable", "figure-2", values={"orca_max.external": 8.9, "orca_oracle.external": 36.6}),
        c("one token of OPT-13B needs about 800 KB", "kv-bytes", values={"OPT-13B.bytes_per_token": 819200, "paper.kb_per_token": 800.0}),
        c("one request can need 1.6 GB", "kv-bytes", values={"OPT-13B.bytes_per_request": 1677721600, "paper.gb_per_request": 1.6}),
        c("with reservation few requests fit", "figure-1", values={"contiguous.max_requests": 7}),
        c("the paper measures 20.4 % to 38.2 %", "figure-2", values={"orca_max.token_states": 20.4, "orca_oracle.token_states": 38.2}),
        c("… and 26.8 % for chunks of powers of two, by its figure", "figure-2", values={"orca_pow2.token_states": 26.8}),
        c("the cure: allocate block by block, as tokens come", "figure-6-v1", "blocks_allocated A 2", block_ids=[3], free_queue_starts_with=[4]),
    ],
    "The landscape": [
        c("paging in operating systems is the parent idea", "page-table", values={"virtual_page": 1, "frame": 5, "num_without_counterpart": 4}),
        c("Orca's iteration-level scheduling leads to the serving engine", "iteration-level-batching",
          values={"request.num_iterations": 14, "iteration.num_iterations": 11}),
        c("the first manager became V1's: what was forked and copied there", "figure-8", "copy_queued",
          event={"source_block_id": 1, "destination_block_id": 3}),
        c("… is shared by hash here", "parallel-sampling-v1", "end", count={"copy_queued": 0, "sequence_forked": 0}),
        c("SGLang's radix tree answers the same question", "duplicates", told="SGLang keeps prefixes in a tree"),
        c("sliding windows and recurrent states lead to recycled blocks", "sliding-window", "blocks_skipped A 1", event={"block_ids": [2, 1]}),
        c("decode context parallelism leads to a coordinator", "decode-context-parallelism", "slots_mapped A 2",
          slots=[-1, 28, -1, 29, -1, 30, -1, 31, -1, 4, -1, 5]),
    ],
    "The core idea": [
        c("managers think in logical block numbers, never in addresses", "page-table", values={"slots": [28, 29, 30, 31, 4, 5, 6, 7, 12]}),
        c("a count tells how many requests depend on a block", "partial-hit-copy", errs="S17"),
        c("everything else is bookkeeping on top", "putting-it-together", "end", hashed=[2, 3, 4, 5, 6, 7, 8], free_queue=[1, 8, 6, 5, 4, 3, 2, 7]),
    ],
    "The symbols": [
        c("block_size: 16 tokens by default", "slot-mapping-16", "blocks_allocated A 1", block_ids=[7], block_table={"A": [7]}),
        c("decode context parallelism multiplies it", "decode-context-parallelism", "request_added A", event={"num_prompt_tokens": 12, "num_block_hashes": 1}),
        c("hash_block_size: the greatest common divisor of the groups' block sizes", "sixteen-and-sixty-four", "step_scheduled", hash_names={1: ["C@16/g0"]},
          errs="S12"),
        c("scheduler_block_size: their least common multiple, on which hits end", "sixteen-and-sixty-four", "prefix_lookup D", num_hit_tokens=64, errs="S12"),
        c("a block has an id, a count, perhaps a hash, and links in the free queue", "touch-rescues", "blocks_touched A2", free_queue=[6, 5, 4, 3],
          ref_cnt={1: 1, 2: 1}),
        c("ref_cnt is the number of requests that share the block", "partial-hit-copy", errs="S17"),
        c("req_to_blocks: per request and group, the ordered list of blocks", "docs-hybrid", "step_scheduled",
          block_table={"A": [[1, 2, 3, 4, 5, 6, 7, 22], [0, 0, 0, 0, 0, 13, 14, 23], [0, 0, 0, 0, 0, 20, 21, 24]]}),
        c("block_hashes: each fingerprints its whole prefix", "eviction-order", "blocks_freed A 1", hash_names={1: ["A@4"], 2: ["A@8"], 3: ["A@12"]}),
        c("num_cached_block: how many leading blocks caching has dealt with", "sliding-window", "request_scheduled A 5", num_cached_block={"A": [5]}),
        c("block 0 is the null block, never cached or freed; it pads skipped positions", "sliding-window", "blocks_allocated A 2",
          block_table={"A": [0, 0, 3, 4, 5]}),
        c("one group per kind of attention", "docs-hybrid", errs="S13"),
    ],
    "1 The block pool": [
        c("the pool makes all blocks at once and links them; block 0 is set aside", "figure-6-v1", "start", free_queue=[1, 2, 3, 4, 5, 6, 7, 8], hashed=[]),
        c("a request is admitted when required blocks are no more than free ones", "admission-sum", "allocation_refused B 1", num_free=3,
          cause="insufficient_blocks", errs="S6"),
        c("allocation pops from the head", "figure-6-v1", "blocks_allocated A 1", block_ids=[1, 2], free_queue=[3, 4, 5, 6, 7, 8]),
        c("freeing appends at the end", "same-prompt-twice", "blocks_freed A -1", event={"prepended": [4], "appended": [2]}, errs="S3"),
        c("a cached block that is handed out again first leaves the map", "eviction-order", "block_evicted * 1", event={"block_id": 3}, cause="reallocated"),
        c("links inside the blocks make removal from the middle cheap", "touch-rescues", "blocks_touched A2", event={"left_free_queue": [1, 2]},
          test="tests/unit/core/test_free_queue.py::test_remove_from_anywhere"),
        c("Figure 5: blocks that are not neighbours, the query meets each by itself", "figure-5", "kv_written * 4", block_table={"A": [7, 1, 3]},
          num_filled={7: 4, 1: 4, 3: 2}),
        c("get_new_blocks: from the head, count + 1", "figure-6", "blocks_allocated A 1", ref_cnt={7: 1, 1: 1}),
        c("the newest reuse is cheapest", "eviction-order", errs="S18"),
        c("free_blocks: at 0, hashed blocks to the tail, unhashed ones to the head", "eviction-order", "blocks_freed B 1",
          event={"prepended": [5], "appended": [4]}, free_queue=[5, 6, 3, 2, 1, 4]),
        c("touch takes blocks out of the queue and counts them", "touch-rescues", "blocks_touched A2", free_queue=[6, 5, 4, 3], ref_cnt={1: 1, 2: 1}),
        c("cache entries never stand in the way of an allocation", "eviction-order", "blocks_allocated C 1", block_ids=[5, 6, 3]),
        c("the end of a chain is evicted before its head", "eviction-order", "prefix_lookup A2", cause="evicted_earlier", errs="S4"),
        c("Figure 6 again: block 3 comes from the head, its ref_cnt becomes 1", "putting-it-together", "row_updated A 2", ref_cnt={3: 1},
          event={"block_ids": [3]}),
        c("the pool gives 7, 1, 3 by itself", "figure-6-v1", "blocks_allocated A 2", block_table={"A": [1, 2, 3]}, errs="S24"),
    ],
    "2 The logical block table": [
        c("the ordered list of a request is its block table and goes to the worker", "putting-it-together", "row_updated A 2", block_table={"A": [7, 1, 3]},
          event={"row": 0, "start": 2, "block_ids": [3]}),
        c("allocate_slots counts the blocks needed, looks at the pool, appends", "figure-6", "blocks_allocated A 1", cause="head_of_free_queue",
          block_ids=[7, 1]),
        c("null blocks stand for skipped positions, so index i stays position i × block size", "sliding-window", "blocks_allocated A 2",
          block_table={"A": [0, 0, 3, 4, 5]}),
        c("the table is only appended to", "sliding-window", "slots_mapped A 2", slots=[20], errs="S14"),
        c("[7, 1] becomes [7, 1, 3]", "figure-6", "blocks_allocated A 2", block_table={"A": [7, 1, 3]}),
    ],
    "3 Reference counts": [
        c("a block is free when its count is 0", "same-prompt-twice", "blocks_freed A -1", ref_cnt={1: 1, 2: 0}),
        c("sharing saves up to 55 % in beam search", "beam-search-v1", "step_scheduled", ref_cnt={1: 4, 2: 3, 4: 3}, errs="S22"),
        c("touch counts up, free counts down; a shared block survives until both are done", "same-prompt-twice", "blocks_freed A -1",
          event={"still_referenced": [1]}),
        c("a writer that diverges from a shared block gets a copy", "parallel-sampling-v1", "kv_written 1_A 2", ref_cnt={7: 2, 1: 1, 3: 1}, errs="S7"),
        c("… in the paper", "figure-8", "copy_queued", cause="shared_block_written", block_table={"A1": [7, 3], "A2": [7, 1]}),
        c("a redirect is recorded and both ends are kept until the copy is made", "partial-hit-copy", "copy_queued B 1",
          event={"source_block_id": 3, "destination_block_id": 6}, errs="S8"),
        c("Figure 7: two sequences in one pool, neither of them in one piece", "figure-7", "kv_written B 1", ref_cnt={7: 1, 1: 1, 3: 1, 5: 1, 2: 1}),
        c("the last reference to a block ends its life", "touch-rescues", "blocks_freed A", hash_names={1: ["A@4"], 2: ["A@8"]}, errs="S23"),
        c("a second request with the same 7 tokens gets physical 7 and 1, and both ref_cnts become 2", "putting-it-together", "blocks_touched B",
          ref_cnt={7: 2, 1: 1}, errs="S1"),
        c("when the first one ends the count drops to 1", "putting-it-together", "blocks_freed A 1", ref_cnt={7: 1}, event={"still_referenced": [7]}),
        c("divergence costs one copy per block, not one of the whole prefix", "figure-10", "copy_queued B",
          event={"source_block_id": 4, "destination_block_id": 7},
          ref_cnt={4: 1, 7: 1}),
    ],
    "4 Hash-based prefix caching": [
        c("a cached prefix need not be computed again", "same-step-sharing", "step_scheduled", event={"num_scheduled_tokens": {"A": 9, "B": 1}}),
        c("a hash covers the parent's hash, the tokens and extra keys", "salt-and-adapter", "prefix_lookup B", num_hit_tokens=0, hash_names={1: ["A@4"]}),
        c("full blocks are registered under hash and group, after the prefill", "figure-6-v1", "block_cached A 1", event={"block_id": 1}, num_filled={1: 0},
          errs="S9"),
        c("the group is part of the key", "hybrid-full-and-window", "step_scheduled", hash_names={1: ["A@4/g0"], 5: ["A@4/g1"]}),
        c("the walk goes from left to right and adopts what it finds", "touch-rescues", "prefix_lookup A2", free_queue=[6, 2, 1, 5, 4, 3], errs="S10"),
        c("blocks behind the hit are new, only the rest is computed", "same-prompt-twice", "request_scheduled B 1",
          event={"num_scheduled_tokens": 3, "num_computed_tokens": 4}),
        c("equal blocks are not merged", "duplicates", "block_cached B", hash_names={2: ["A@8"], 3: ["A@8"]}, event={"duplicates": [2]}),
        c("chaining makes it one lookup per block", "eviction-order", "prefix_lookup A2", num_hit_tokens=8, event={"hit_block_ids": [1, 2]}),
        c("the second request computes none of its 7 tokens: the hit is 7 and 1", "same-prompt-twice", "prefix_lookup B", num_hit_tokens=4,
          event={"hit_block_ids": [1]}, errs="S1"),
        c("only full blocks are cached, the last partial one never", "same-prompt-twice", "kv_written A 1", num_filled={1: 4, 2: 3}, hashed=[1]),
    ],
    "5 Groups of hybrid models": [
        c("all groups share one hit length", "hybrid-full-and-window", "prefix_lookup B", num_hit_tokens=12, event={"hit_block_ids": [1, 2, 3, 6, 7]}),
        c("groups have different block sizes; the shortest agreeing hit is the safe one", "sixteen-and-sixty-four", "prefix_lookup D",
          event={"hit_block_ids": [1, 2, 3, 4, 8]}),
        c("kinds of groups are many: latents (MLA) are one of them", "latent-attention", "start", page_size_bytes=[4608]),
        c("a fixed-point loop: groups accept or shorten until nobody does", "fixed-point", "prefix_lookup B 3", num_hit_tokens=16, event={"junction": 32}),
        c("full attention is checked once and then only trimmed", "fixed-point", "prefix_lookup B 2", num_hit_tokens=24),
        c("a large block's hash is the last small hash inside it", "sixteen-and-sixty-four", "step_scheduled", hash_names={8: ["C@64/g1"]}),
        c("blocks of 16 and 64: 32 cached by attention, 16 by Mamba give a hit of 16", "sixteen-and-sixty-four", "prefix_lookup B", num_hit_tokens=0,
          errs="S11"),
        c("… a state at 32 exists only in the mode align", "sixteen-and-sixty-four-align", "prefix_lookup B", num_hit_tokens=32),
        c("a hit is as long as the weakest group's", "hybrid-full-and-window", "prefix_lookup C", num_hit_tokens=0),
    ],
    "6 Recycling": [
        c("blocks that are never read again are freed while the request runs", "sliding-window", "blocks_skipped A 1", event={"appended": [2, 1]}),
        c("a window frees everything before computed − window + 1", "window-of-2048", "blocks_skipped A 1", cause="outside_window", errs="S15"),
        c("chunked local attention frees whole chunks", "chunked-local", "blocks_skipped A", event={"logical_indices": [3, 2]}),
        c("Mamba frees every state but the last", "mamba-all", "blocks_skipped A", event={"block_ids": [3, 2, 1]}),
        c("… not always", "mamba-align", "step_scheduled", block_table={"A": [0, 1, 2]}, errs="S16"),
        c("R-SWA frees the gap between the prompt and the window", "outputs-window", "blocks_allocated A 4", block_table={"A": [1, 2, 0, 4, 5]}),
        c("null blocks take the freed places", "sliding-window", "request_scheduled A 5", block_table={"A": [0, 0, 0, 4, 5]}),
        c("4000 tokens and a window of 2048: about 1952 tokens are freed", "window-of-2048", "blocks_skipped A 1", num_free=131,
          told="122 whole blocks, 1952 tokens"),
        c("the peak is bounded by the window, not by the prompt", "window-of-2048", "token_sampled A 1", num_free=9, errs="S15"),
        c("memory is O(window + prefix)", "window-in-chunks", "step_scheduled", num_free=99),
    ],
    "7 The worker's table": [
        c("ids per group go into the rows of a MultiGroupBlockTable", "figure-6-v1", errs="S20",
          test=_BLOCK_TABLE + "test_multi_group_table_has_one_table_per_group"),
        c("int32 buffers on host and GPU; add_row writes, commit copies", "slot-mapping-16", told="written on the host and copied to the GPU",
          test=_BLOCK_TABLE + "test_r8_2_nothing_reaches_the_device_before_commit_and_then_only_the_first_rows"),
        c("a kernel fills the slot mapping", "putting-it-together", "kv_written A 1", slots=[28, 29, 30, 31, 4, 5, 6],
          test=_BLOCK_TABLE + "test_r8_4_slots_of_figure_6"),
        c("blocks are split when the kernel's are smaller", "slot-mapping-16", told="the two numbers 14 and 15 for block 7",
          test=_BLOCK_TABLE + "test_r8_4_blocks_split_into_kernel_blocks"),
        c("the row reads [7, 1] and later [7, 1, 3]", "putting-it-together", "row_updated A 2", block_table={"A": [7, 1, 3]}),
        c("positions 0-15 lie in block 7, 16-31 in block 1", "slot-mapping-16", "slots_mapped A 1", slots=[112, 113, 114, 115, 116, 117, 118], errs="S2"),
    ],
    "8 The slot mapping": [
        c("slot = block × block size + offset, one entry per token t", "same-prompt-twice", "slots_mapped B 1", slot_mapping=[11, 12, 13, 14], errs="S19"),
        c("an int64 buffer of max_num_batched_tokens", "slot-mapping-16", "slots_mapped A 2", slots=[119],
          told="list of 64-bit numbers as long as the token budget",
          test=_BLOCK_TABLE + "test_r8_1_types_and_shapes_and_width_in_kernel_blocks"),
        c("one program per request", "same-prompt-twice", errs="S19", test=_SLOTS + "test_r8_4_decode_and_prefill_in_one_batch"),
        c("-1 for padding", "slot-mapping-16", told="and -1 in all others", test=_SLOTS + "test_r8_4_one_request_and_padding"),
        c("-1 for tokens of another rank", "decode-context-parallelism", "slots_mapped A 5", slots=[-1]),
        c("each layer sees its group's mapping; groups of an encoder get zeros", "hybrid-full-and-window", "slots_mapped A 1", slot={0: 20, 15: 35},
          told="would get zeros"),
        c("block size 16: position 0 is 7*16 + 0 = 112, position 15 is 127", "slot-mapping-16", "kv_written A 10", slots=[127], num_filled={7: 16}),
        c("position 16 is 1*16 + 0 = 16", "slot-mapping-16", "slots_mapped A 11", slots=[16], slot={16: 16}, errs="S2"),
        c("decode tokens land in the next slot of block 1, then of block 3", "putting-it-together", "kv_written A 3", slots=[12],
          num_filled={7: 4, 1: 4, 3: 1}),
        c("the table is int32 [request, block], the mapping int64 [token]", "slot-mapping-16", told="64-bit numbers",
          test=_BLOCK_TABLE + "test_r8_1_types_and_shapes_and_width_in_kernel_blocks"),
    ],
    "Putting it together": [
        c("step 1: the pool is sized from memory and page size", "figure-1", values={"table_1.OPT-13B.num_slots": 15728}),
        c("… and its blocks are linked into the free queue", "putting-it-together", "trace_started", event={"num_blocks": 9},
          free_queue=[1, 2, 3, 4, 5, 6, 7, 8]),
        c("step 2: A's 7 tokens need 2 blocks, 7 and 1 are popped", "putting-it-together", "blocks_allocated A 1", block_ids=[7, 1], num_free=6),
        c("… and their hashes are registered after prefill", "putting-it-together", "block_cached A 1", hashed=[7], num_filled={7: 0}, errs="S9"),
        c("step 3: outputs fill block 1, then block 3 is taken and the row is [7, 1, 3]", "putting-it-together", "row_updated A 2",
          block_table={"A": [7, 1, 3]}),
        c("step 4: B finds 7 and 1, ref_cnts become 2, no prefill", "putting-it-together", "prefix_lookup B", num_hit_tokens=4, event={"hit_block_ids": [7]},
          errs="S1"),
        c("step 5: A ends, shared blocks go back to ref_cnt 1", "putting-it-together", "blocks_freed A 1", ref_cnt={7: 1}),
        c("… and its private tail goes to the far end of the queue", "putting-it-together", "blocks_freed A 1", event={"prepended": [3]}, errs="S3"),
        c("step 6: with an empty queue a cached block is evicted", "putting-it-together", "block_evicted * 1", event={"block_id": 1}, errs="S5"),
        c("… and its hash is dropped", "putting-it-together", "block_evicted * 1", hashed=[2, 7]),
        c("… while a really empty queue makes others wait", "putting-it-together", "allocation_refused D", num_free=0, waiting=["D"]),
    ],
    "What it buys": [
        c("2-4x the throughput of FasterTransformer and Orca, on OPT-13B with ShareGPT and Alpaca", "figure-1", told="2 to 4 times the throughput"),
        c("the largest gains with long sequences and shared prefixes", "figure-10", "sequence_forked B", ref_cnt={0: 3, 1: 3, 2: 3, 3: 3}),
        c("beam search saves up to 55 % of the memory", "figure-9", "kv_written -1", ref_cnt={0: 4, 1: 3, 3: 3}),
        c("… which is the paper's number", "parallel-sampling-v1", errs="S22"),
        c("no reservation, no internal waste beyond one block, no external waste", "figure-2", values={"paged.token_states": 96.3}),
        c("more requests at a time mean that weights are read for more tokens", "iteration-level-batching", values={"iteration.utilisation_percent": 84.8485}),
    ],
    "How to read the numbers": [
        c("they are of 2023, for OPT-13B on one GPU, and no general factors", "figure-1", told="no promise for other models"),
        c("hit rates depend on how much prompts overlap", "salt-and-adapter", "prefix_lookup C", num_hit_tokens=0),
    ],
    "Where it breaks": [
        c("prompts without a common prefix: hashes for nothing", "putting-it-together", "prefix_lookup C", num_hit_tokens=0, cause="not_cached"),
        c("blocks are evicted between equal requests", "eviction-order", "prefix_lookup A2", cause="evicted_earlier"),
        c("small blocks cost the kernel, block size 1 most", "slot-mapping-16", told="tables are a quarter as long"),
        c("large blocks waste up to one block", "slot-mapping-16", "kv_written A 1", num_filled={7: 7}),
        c("a copy that is never made: stale reads or double frees", "partial-hit-copy", "blocks_copied * 2",
          event={"source_block_ids": [3, 5], "destination_block_ids": [6, 7]}, errs="S25"),
        c("hashing long prompts costs; prefix_match_unit changes it", "partial-hit-copy", told="twice as many hashes"),
        c("… retention intervals keep fewer entries", "retention-interval", "caching_skipped A", event={"logical_indices": [0, 1, 4, 5]}),
        c("a deeper prefix may be gone while a shorter one is there, so groups are reconciled", "fixed-point", "prefix_lookup B 1", num_hit_tokens=28),
    ],
    "One thing to remember": [
        c("one physical block per logical block, a table per request, and a count", "figure-6", "kv_written A 3", num_filled={7: 4, 1: 4, 3: 1}),
    ],
}  # fmt: skip
