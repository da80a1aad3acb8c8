"""Whether an iteration of the paper's engine can be run as planned, and the slots that follow from it. No torch: asked by the worker and by the bookkeeping."""

from __future__ import annotations

from engine.errors import EngineError
from engine.paper.step import IterationPlan, ScheduledSequence


def slots_of(sequence: ScheduledSequence, block_size: int) -> list[int]:
    """Physical slot of every token that the iteration computes: block_ids[position // block_size] * block_size + position % block_size (R8.4)."""
    start = sequence.num_computed_tokens
    positions = range(start, start + sequence.num_scheduled_tokens)
    return [sequence.block_ids[position // block_size] * block_size + position % block_size for position in positions]


def check_plan(plan: IterationPlan, *, block_size: int, num_blocks: int) -> None:
    """Raises EngineError, in one sentence, for a plan that contradicts itself: tokens that are not there, a table that is too short or names no block of the
    pool, draws from the middle of a prompt, copies to one block twice, and two tokens for one slot (a shared block that was not copied before the write)."""
    seen: dict[int, str] = {}
    ids = [sequence.sequence_id for sequence in plan.sequences]
    if len(set(ids)) != len(ids):
        raise EngineError(f"The iteration names the sequences {', '.join(ids)}, but each can be in it only once; plan each sequence once.")
    destinations = [destination for _, destination in plan.copies]
    if len(set(destinations)) != len(destinations):
        raise EngineError(f"The blocks {destinations} are to be copied to, but a block can take only one copy; name each destination once.")
    for sequence in plan.sequences:
        _check_sequence(sequence, block_size, num_blocks)
        for slot in slots_of(sequence, block_size):
            if slot in seen:
                raise EngineError(
                    f"{seen[slot]} and {sequence.sequence_id} would both write to slot {slot} of block {slot // block_size}; "
                    "a shared block must be copied before the first write."
                )
            seen[slot] = sequence.sequence_id


def _check_sequence(sequence: ScheduledSequence, block_size: int, num_blocks: int) -> None:
    name, known = sequence.sequence_id, len(sequence.token_ids)
    end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
    if sequence.num_computed_tokens < 0 or sequence.num_scheduled_tokens < 1 or end > known:
        raise EngineError(
            f"{sequence.num_scheduled_tokens} tokens of sequence {name} are scheduled from position {sequence.num_computed_tokens} on, "
            f"but it has {known} tokens; schedule at least one token that is known."
        )
    if len(sequence.block_ids) * block_size < end:
        raise EngineError(f"Sequence {name} has {len(sequence.block_ids)} blocks of {block_size} tokens, too few for {end} tokens; give it more blocks.")
    for block_id in sequence.block_ids:
        if not 0 <= block_id < num_blocks:
            raise EngineError(f"The block table of sequence {name} names block {block_id}, but the pool's blocks are 0 to {num_blocks - 1}; check the plan.")
    if len(sequence.draws) != len(sequence.draw_names):
        raise EngineError(f"Sequence {name} has {len(sequence.draws)} draws and {len(sequence.draw_names)} names for them; give each draw a name.")
    if (sequence.draws or sequence.num_logprobs or sequence.token_ids_asked) and end != known:
        raise EngineError(f"Sequence {name} computes {end} of {known} tokens, so its next token is known already; ask for nothing before the last one.")
