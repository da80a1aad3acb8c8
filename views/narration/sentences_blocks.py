"""What happened to blocks, tables and the prefix cache: one short sentence per event kind."""

from __future__ import annotations

from engine.trace import events as e
from engine.trace.events import CauseKind
from views.narration.sentence import Sentence
from views.narration.words import Words, blocks, count, listed, places, real


def _trace_started(words: Words, event: e.TraceStarted) -> str:
    fresh = f"A fresh pool: {count(event.num_blocks - 1, 'free block')}"
    if len(words.groups) > 1:
        few = len(words.groups) < 4
        shared = f"the groups {listed(group.label for group in words.groups)}" if few else count(len(words.groups), "KV-cache group")
        return f"{fresh}, shared by {shared}, and the null block 0."
    if words.groups[0].is_state:
        return f"{fresh}, each for one recurrent state, and the null block 0."
    return f"{fresh} of {count(event.block_size, 'slot')} each, and the null block 0."


def _prefix_lookup(words: Words, event: e.PrefixLookup) -> str:
    everywhere = " that every group has" if event.groups else ""
    if not event.num_hit_tokens:
        return f"{event.request_id} finds {'no beginning' if everywhere else 'nothing'} of its prompt{everywhere} in the prefix cache."
    found = f": {blocks(event.hit_block_ids)}" if real(event.hit_block_ids) and not event.groups else ""
    return f"{event.request_id} finds {count(event.num_hit_tokens, 'token')}{everywhere} in the prefix cache{found}."


def _blocks_touched(words: Words, event: e.BlocksTouched) -> str:
    if event.cause.kind is CauseKind.PREPARED or event.request_id is None:
        return f"The scenario takes hold of {blocks(event.block_ids)}, to lay the queue out anew."
    adopted, group = real(event.block_ids), words.for_group(event.group_id)
    num_null = event.num_null_blocks + len(event.block_ids) - len(adopted)
    if not adopted:
        begins = f"begins with {count(num_null, 'null block')}" if num_null else "stays empty"
        return f"{event.request_id} adopts no block{group}: its table {begins}."
    null = f"; {count(num_null, 'place')} before {'it' if len(adopted) == 1 else 'them'} stay{'s' if num_null == 1 else ''} null" if num_null else ""
    return f"{event.request_id} adopts cached {blocks(adopted)}{group}{null}."


def _block_evicted(words: Words, event: e.BlockEvicted) -> str:
    loses = f"Block {event.block_id} loses its hash {event.block_hash[:6]}"
    if event.cause.kind is CauseKind.PROMOTED:
        return f"{loses}: it ended inside the block, and the full block's hash takes over."
    return f"{loses}: it is evicted from the prefix cache."


def _evicted_symbol(words: Words, event: e.BlockEvicted) -> str:
    if event.cause.kind is CauseKind.PROMOTED:
        return "BlockPool.cache_full_blocks"
    return "BlockPool.evict_blocks" if event.cause.kind is CauseKind.SCENARIO else "BlockPool._maybe_evict_cached_block"


def _evicted_rule(words: Words, event: e.BlockEvicted) -> str:
    return {CauseKind.PROMOTED: "R1.11", CauseKind.SCENARIO: "R1.13"}.get(event.cause.kind, "R1.5")


def _blocks_allocated(words: Words, event: e.BlocksAllocated) -> str:
    if event.cause.kind is CauseKind.PREPARED or event.request_id is None:
        return f"The scenario takes all free blocks, {listed(event.block_ids)}, to lay the queue out anew."
    return f"{event.request_id} takes {blocks(event.block_ids)}{words.for_group(event.group_id)}."


def _block_cached(words: Words, event: e.BlockCached) -> str:
    gets = f"Block {event.block_id} gets the hash {event.block_hash[:6]}"
    if ends_inside(words, event):
        what = "a state between two block ends" if words.group(event.group_id).is_state else "it ends inside the block"
        return f"{gets} of the first {count(event.num_hash_tokens, 'token')}{words.for_group(event.group_id)}: {what}."
    return f"{gets}{words.for_group(event.group_id)}."


def ends_inside(words: Words, event: e.BlockCached) -> bool:
    """Whether the hash covers less than the block (R6.3)."""
    return event.num_hash_tokens is not None and bool(event.num_hash_tokens % words.block_size(event.group_id))


def _cached_symbol(words: Words, event: e.BlockCached) -> str:
    return "BlockPool.cache_partial_block" if event.cause.kind is CauseKind.PROMPT_BOUNDARY else "BlockPool.cache_full_blocks"


def _cached_rule(words: Words, event: e.BlockCached) -> str:
    return "R6.3" if event.cause.kind is CauseKind.PROMPT_BOUNDARY else "R1.11"


def _caching_skipped(words: Words, event: e.CachingSkipped) -> str:
    which = places(event.logical_indices)
    verb = "gets" if len(event.logical_indices) == 1 else "get"
    return f"{which[:1].upper()}{which[1:]} of {event.request_id} {verb} no hash{words.for_group(event.group_id)}."


def _skipped_caching_symbol(words: Words, event: e.CachingSkipped) -> str:
    return "BlockPool.cache_full_blocks" if event.cause.kind is CauseKind.NULL_BLOCK else "SingleTypeKVCacheManager.reachable_block_mask"


def _skipped_caching_rule(words: Words, event: e.CachingSkipped) -> str:
    return "R1.11" if event.cause.kind is CauseKind.NULL_BLOCK else "R3.21"


def _blocks_freed(words: Words, event: e.BlocksFreed) -> str:
    if event.cause.kind is CauseKind.PREPARED:
        if event.appended and not event.prepended:
            return f"The free queue is laid out anew: {listed(event.appended)}."
        first = f"{listed(event.prepended)} come first" if event.prepended else ""
        last = f"{listed(event.appended)} come last" if event.appended else ""
        return f"The free queue is laid out: {'; '.join(part for part in (first, last) if part) or 'it stays as it is'}."
    if event.cause.kind is CauseKind.COPY_QUEUED:
        return f"What was held for the copies is let go: {blocks(event.block_ids)}."
    given, gone = real(event.block_ids), [*event.prepended, *event.appended]
    group = words.for_group(event.group_id)
    who = f"{event.request_id} gives back" if event.request_id else "Given back:"
    if given and not gone:
        return f"{who} {blocks(given)}{group}; others still hold {'it' if len(given) == 1 else 'them'}."
    return f"{who} {blocks(given)}{group}."


def _freed_rule(words: Words, event: e.BlocksFreed) -> str:
    return "R6.6" if event.cause.kind is CauseKind.COPY_QUEUED else "R1.7"


def _blocks_skipped(words: Words, event: e.BlocksSkipped) -> str:
    become = "becomes" if len(event.logical_indices) == 1 else "become"
    ids = event.block_ids
    falling = len(ids) > 3 and ids == list(range(ids[0], ids[0] - len(ids), -1))  # the usual case: taken in order, given back from the end
    which = f"blocks {ids[0]} down to {ids[-1]}" if falling else blocks(ids)
    gone = f"{event.request_id} lets go of {which}{words.for_group(event.group_id)}"
    return f"{gone}: {places(event.logical_indices)} {become} null."


def _skipped_symbol(words: Words, event: e.BlocksSkipped) -> str:
    manager = {"Mamba": "MambaManager", "R-SWA": "RSWAManager"}.get(words.group(event.group_id).label.split()[0], "SingleTypeKVCacheManager")
    return f"{manager}.remove_skipped_blocks"


def _skipped_rule(words: Words, event: e.BlocksSkipped) -> str:
    return "R3.50" if words.group(event.group_id).label.startswith("R-SWA") else "R3.2"


def _state_blocks_arranged(words: Words, event: e.StateBlocksArranged) -> str:
    grows = f"{event.request_id}'s table of states grows to {count(event.num_blocks, 'place')}{words.for_group(event.group_id)}"
    if not event.moved_from:
        return f"{grows}: {'a null block fills' if event.num_blocks == 1 else 'null blocks fill'} it up."
    moved = f"the block at {places(event.moved_from)} moves" if len(event.moved_from) == 1 else f"the blocks at {places(event.moved_from)} move"
    return f"{grows}: {moved} to the end and leave{'s' if len(event.moved_from) == 1 else ''} null behind."


def _copy_queued(words: Words, event: e.CopyQueued) -> str:
    source, destination, group = event.source_block_id, event.destination_block_id, words.for_group(event.group_id)
    if event.cause.kind is CauseKind.OWN_BOUNDARY:
        return f"A copy of block {source} is queued{group}: block {destination} will keep what is cached."
    whose = f"{event.request_id}'s table gets" if event.request_id else "The table gets"
    return f"A copy of block {source} is queued{group}: {whose} block {destination} in its place."


def _copy_symbol(words: Words, event: e.CopyQueued) -> str:
    return "BlockPool.move_block_hashes" if event.cause.kind is CauseKind.OWN_BOUNDARY else "SingleTypeKVCacheManager._apply_cow"


def _copy_rule(words: Words, event: e.CopyQueued) -> str:
    return "R6.5" if event.cause.kind is CauseKind.OWN_BOUNDARY else "R6.4"


def _blocks_copied(words: Words, event: e.BlocksCopied) -> str:
    pairs = [f"{s} → {d}" for s, d in zip(event.source_block_ids, event.destination_block_ids, strict=True)]
    return f"Copied, all layers at once: block {listed(pairs)}."


def _prefix_cache_reset(words: Words, event: e.PrefixCacheReset) -> str:
    return "The prefix cache is emptied: every hash is gone." if event.ok else "The prefix cache is not emptied: blocks are still in use."


BLOCK_SENTENCES: dict[str, Sentence] = {
    "trace_started": Sentence(_trace_started, "BlockPool.__init__", "R1.1"),
    "prefix_lookup": Sentence(_prefix_lookup, "KVCacheManager.get_computed_blocks", lambda words, event: "R4.4" if event.groups else "R5.1"),
    "blocks_touched": Sentence(_blocks_touched, "BlockPool.touch", "R1.6"),
    "block_evicted": Sentence(_block_evicted, _evicted_symbol, _evicted_rule),
    "blocks_allocated": Sentence(_blocks_allocated, "BlockPool.get_new_blocks", "R1.5"),
    "block_cached": Sentence(_block_cached, _cached_symbol, _cached_rule),
    "caching_skipped": Sentence(_caching_skipped, _skipped_caching_symbol, _skipped_caching_rule),
    "blocks_freed": Sentence(_blocks_freed, "BlockPool.free_blocks", _freed_rule),
    "blocks_skipped": Sentence(_blocks_skipped, _skipped_symbol, _skipped_rule),
    "state_blocks_arranged": Sentence(_state_blocks_arranged, "MambaManager.allocate_new_blocks", "R3.43"),
    "copy_queued": Sentence(_copy_queued, _copy_symbol, _copy_rule),
    "blocks_copied": Sentence(_blocks_copied, "copy_kv_cache_blocks_inplace", "R6.7"),
    "prefix_cache_reset": Sentence(_prefix_cache_reset, "BlockPool.reset_prefix_cache", "R1.14"),
}
