"""A model without weights and a worker without tensors, for the paper's engine: everything is a pure function of the tokens so far.

The worker keeps, for every slot of both pools, the whole prefix of tokens whose last key and value would lie there. So a block that is shared, copied, swapped,
overwritten or computed wrongly shows at once: a sequence reads something that is not its own tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from engine.core.output import SampledToken, SamplingParams
from engine.paper.config import PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import SequenceGroup, SequenceStatus
from engine.paper.step import IterationPlan, SequenceOutput
from engine.trace.events import Cause, CauseKind

VOCABULARY = 12
STOP = 3

Slots = dict[tuple[int, int], tuple[int, ...]]


def logprobs(tokens: tuple[int, ...]) -> list[float]:
    """Of every token of the vocabulary after these; no two are equal."""
    weights = [Random(f"{tokens} {token_id}").random() ** 3 + 1e-6 for token_id in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def draw(tokens: tuple[int, ...], params: SamplingParams) -> int:
    """The next token: the most probable one, or at a temperature one that the seed decides."""
    known = logprobs(tokens)
    if params.temperature == 0:
        return max(range(VOCABULARY), key=lambda token_id: known[token_id])
    return Random(f"{tokens} {params.seed}").randrange(VOCABULARY)


class SlotWorker:
    """Executes plans on `slots`: (block id, offset) -> the prefix that lies there; `cpu_slots` likewise. Never writes where somebody else reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: Slots = {}
        self.cpu_slots: Slots = {}

    def execute(self, plan: IterationPlan) -> dict[str, SequenceOutput]:
        """Swap out, swap in, copy, write, and only then read: the order that the plan promises."""
        self._move(self.slots, self.cpu_slots, plan.swap_out)
        self._move(self.cpu_slots, self.slots, plan.swap_in)
        self._move(self.slots, self.slots, plan.copies)
        written: Counter[tuple[int, int]] = Counter()
        for sequence in plan.sequences:
            assert sequence.num_scheduled_tokens > 0
            end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            assert end <= len(sequence.token_ids)
            for position in range(sequence.num_computed_tokens, end):
                slot = sequence.block_ids[position // self.block_size], position % self.block_size
                self.slots[slot] = sequence.token_ids[: position + 1]
                written[slot] += 1
        assert all(times == 1 for times in written.values()), "two sequences write to the same slot"
        outputs: dict[str, SequenceOutput] = {}
        for sequence in plan.sequences:
            end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            self.check_table(sequence.token_ids, sequence.block_ids, end, self.slots)
            asks = sequence.draws or sequence.num_logprobs or sequence.token_ids_asked
            assert not asks or end == len(sequence.token_ids)
            tokens = [self._token(sequence.token_ids, params, sequence.num_output_tokens) for params in sequence.draws]
            known = logprobs(sequence.token_ids)
            best = sorted(range(VOCABULARY), key=lambda token_id: -known[token_id])[: sequence.num_logprobs]
            outputs[sequence.sequence_id] = SequenceOutput(tuple(tokens), {t: known[t] for t in dict.fromkeys([*best, *sequence.token_ids_asked])})
        return outputs

    @staticmethod
    def _token(tokens: tuple[int, ...], params: SamplingParams, num_output_tokens: int) -> SampledToken:
        said = draw(tokens, params)
        if num_output_tokens < len(params.forced_token_ids):
            return SampledToken(params.forced_token_ids[num_output_tokens], Cause(CauseKind.FORCED, {"model_token_id": said}))
        return SampledToken(said, Cause(CauseKind.GREEDY, {"probability": 1.0}))

    def _move(self, source: Slots, target: Slots, pairs: tuple[tuple[int, int], ...]) -> None:
        """All sources are read before anything is written."""
        pages = [(to, offset, source.get((block_id, offset))) for block_id, to in pairs for offset in range(self.block_size)]
        for to, offset, content in pages:
            target.pop((to, offset), None)
            if content is not None:
                target[to, offset] = content

    def check_table(self, token_ids: tuple[int, ...] | list[int], block_ids: tuple[int, ...], num_tokens: int, slots: Slots) -> None:
        """The first `num_tokens` slots of the table hold exactly these tokens, each after all before it."""
        for position in range(num_tokens):
            found = slots.get((block_ids[position // self.block_size], position % self.block_size))
            assert found == tuple(token_ids[: position + 1]), f"position {position} of {list(token_ids)} holds {found}"

    def check_all(self, scheduler: PaperScheduler) -> None:
        """Every sequence that has blocks finds its own tokens in them, scheduled or not, on the GPU or swapped. Only while a group is computed again over
        several iterations may a shared slot still wait for the sequence that computes it."""
        for sequence in scheduler.sequences.values():
            block_ids = scheduler.block_manager.block_ids(sequence.sequence_id)
            on_cpu = sequence.status is SequenceStatus.SWAPPED
            skipped = sequence.group.num_prefix_tokens // self.block_size * self.block_size if on_cpu else 0
            slots = self.cpu_slots if on_cpu else self.slots
            awaited = self._awaited_slots(scheduler, sequence.group, skipped)
            for position in range(skipped, sequence.num_computed_tokens if block_ids else 0):
                slot = block_ids[(position - skipped) // self.block_size], position % self.block_size
                if slot not in awaited:
                    assert slots.get(slot) == tuple(sequence.token_ids[: position + 1]), f"position {position} of {sequence} holds {slots.get(slot)}"

    def _awaited_slots(self, scheduler: PaperScheduler, group: SequenceGroup, skipped: int) -> set[tuple[int, int]]:
        """Slots that a sequence of the group has yet to fill in its recomputation."""
        awaited: set[tuple[int, int]] = set()
        for sequence in group.living:
            block_ids = scheduler.block_manager.block_ids(sequence.sequence_id)
            if block_ids and sequence.num_uncomputed_tokens > 1:
                positions = range(max(skipped, sequence.num_computed_tokens), sequence.num_tokens - 1)
                awaited |= {(block_ids[(p - skipped) // self.block_size], p % self.block_size) for p in positions}
        return awaited


def check_books(scheduler: PaperScheduler) -> None:
    """ref_cnt = table entries that name the block; queued if and only if nobody does; swapped tables are in the CPU pool and all others in the GPU's."""
    manager = scheduler.block_manager
    entries = {True: Counter[int](), False: Counter[int]()}
    for sequence_id, table in manager.block_tables.items():
        on_cpu = scheduler.sequences[sequence_id].status is SequenceStatus.SWAPPED
        blocks = (manager.cpu_allocator if on_cpu else manager.gpu_allocator).blocks
        assert all(blocks[block.block_id] is block for block in table)
        entries[on_cpu].update(block.block_id for block in table)
    for on_cpu, allocator in ((False, manager.gpu_allocator), (True, manager.cpu_allocator)):
        queue = allocator.free_block_ids
        assert len(queue) == len(set(queue)) == allocator.num_free_blocks
        for block in allocator.blocks:
            assert block.ref_cnt == entries[on_cpu][block.block_id]
            assert (block.block_id in queue) == (block.ref_cnt == 0)


def expected_samples(spec: PaperRequestSpec, max_model_len: int | None) -> list[tuple[list[int], str]]:
    """Outputs and end of each sample, drawn one by one, without blocks."""
    samples: list[tuple[list[int], str]] = []
    for index in range(spec.n):
        params = SamplingParams(max_tokens=spec.max_tokens, temperature=spec.temperature, seed=spec.seed + index)
        forced = spec.forced_token_ids[index] if index < len(spec.forced_token_ids) else ()
        outputs: list[int] = []
        end = ""
        while not end:
            outputs.append(forced[len(outputs)] if len(outputs) < len(forced) else draw((*spec.prompt_token_ids, *outputs), params))
            if outputs[-1] in spec.stop_token_ids:
                end = "stop"
            elif len(outputs) == spec.max_tokens or len(spec.prompt_token_ids) + len(outputs) == max_model_len:
                end = "length"
        samples.append((outputs, end))
    return samples


def expected_beams(spec: PaperRequestSpec, max_model_len: int | None) -> list[tuple[list[int], float]]:
    """Outputs and scores of the finished beams, best first, as transformers' beam search with early_stopping=False has them: a table of all continuations of
    all beams, of which the best (1 + number of stop tokens, at least 2) times the width are looked at; those that end count if they are among the best
    width."""
    width = spec.beam_width
    assert width is not None
    room = spec.max_tokens if max_model_len is None else min(spec.max_tokens, max_model_len - len(spec.prompt_token_ids))
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, room + 1):
        table = [(total + known, [*outputs, token]) for total, outputs in beams for token, known in enumerate(logprobs((*spec.prompt_token_ids, *outputs)))]
        looked_at = sorted(table, key=lambda entry: -entry[0])[: max(2, 1 + len(spec.stop_token_ids)) * width]
        ends = [length == room or outputs[-1] in spec.stop_token_ids for _, outputs in looked_at]
        finished += [(total / length**spec.length_penalty, outputs) for (total, outputs), end in list(zip(looked_at, ends, strict=True))[:width] if end]
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        beams = [entry for entry, end in zip(looked_at, ends, strict=True) if not end][:width]
        if not beams or (len(finished) == width and beams[0][0] / length**spec.length_penalty <= finished[-1][0]):
            break
    return [(outputs, score) for score, outputs in finished]
