"""A memory manager for sequences, made by hand for the worker's tests: reference counts, forks, copy-on-write, swapping, on random physical blocks.

It shares nothing with `engine.paper` but the plan's format, so that the worker is tested alone, and it can be told to forget copies.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.core.output import SamplingParams
from engine.paper.config import PaperConfig
from engine.paper.step import IterationPlan, IterationRunner, ScheduledSequence, SequenceOutput
from engine.trace.events import Emit
from engine.worker.kernel_settings import KernelSettings
from engine.worker.sequence_runner import SequenceRunner
from tests.worker.harness import TORCH


def make_sequence_runner(
    model: PreTrainedModel, kernel_settings: KernelSettings = TORCH, emit: Emit | None = None, attention_shares: bool = False, block_size: int = 4
) -> SequenceRunner:
    """A runner whose pages are not-a-number until something is written, so that whoever reads a slot too many is found out."""
    config = PaperConfig(
        num_blocks=64, block_size=block_size, num_cpu_blocks=32, max_num_seqs=12, max_num_batched_tokens=128, attention_shares=attention_shares
    )
    runner = SequenceRunner(model, config=config, max_model_len=96, kernel_settings=kernel_settings, emit=emit)
    poison(runner, range(config.num_blocks))
    return runner


def poison(runner: SequenceRunner, block_ids: range | list[int] | set[int]) -> None:
    """Overwrite pages with not-a-number in every layer."""
    for cache in (*runner.kv_cache.key_caches, *runner.kv_cache.value_caches):
        cache[list(block_ids)] = torch.nan


@dataclass
class HandMadeSequence:
    """What the manager knows of one sequence. `cpu_block_ids`: its table while it is swapped out."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    cpu_block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


class HandMadeGroups:
    """Plans iterations for `runner` and takes over what it draws. `forget_copies`: plans name new blocks but no copies (the mutation)."""

    def __init__(self, runner: IterationRunner, block_size: int = 4, num_blocks: int = 64, seed: int = 0, forget_copies: bool = False) -> None:
        self.runner = runner
        self.block_size = block_size
        self.sequences: dict[str, HandMadeSequence] = {}
        self.plans: list[IterationPlan] = []
        self._forget_copies = forget_copies
        self._random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.free_cpu = list(range(32))
        self._random.shuffle(self.free)
        self._random.shuffle(self.free_cpu)
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self._finished: list[str] = []

    # ------------------------------------------------------------------ what tests say
    def add(self, name: str, prompt: list[int], params: SamplingParams | None = None) -> None:
        self.sequences[name] = HandMadeSequence(list(prompt), len(prompt), params or SamplingParams(max_tokens=64))

    def fork(self, parent: str, child: str, params: SamplingParams | None = None) -> None:
        """The same tokens and the same table, the partial last block included."""
        old = self.sequences[parent]
        self.sequences[child] = HandMadeSequence(
            list(old.token_ids), old.num_prompt_tokens, params or old.params, list(old.block_ids), [], min(old.num_computed, len(old.token_ids))
        )

    def drop(self, name: str) -> None:
        self._release(self.sequences.pop(name).block_ids, after=name)
        self._finished.append(name)

    def append(self, name: str, token_id: int) -> None:
        self.sequences[name].token_ids.append(token_id)

    def swap_out(self, names: list[str]) -> set[int]:
        """All of them or none, each shared block once. Returns the blocks of the pool that are free again."""
        places: dict[int, int] = {}
        for name in names:
            sequence = self.sequences[name]
            for block_id in sequence.block_ids:
                if block_id not in places:
                    places[block_id] = self.free_cpu.pop()
            sequence.cpu_block_ids = [places[block_id] for block_id in sequence.block_ids]
            sequence.block_ids = []
        self._swap_out += places.items()
        freed = {block_id for block_id in places if not self._refs()[block_id]}
        self.free += sorted(freed)
        return freed

    def swap_in(self, names: list[str]) -> None:
        """To other blocks than before: the free ones are shuffled."""
        self._random.shuffle(self.free)
        places: dict[int, int] = {}
        for name in names:
            sequence = self.sequences[name]
            for block_id in sequence.cpu_block_ids:
                if block_id not in places:
                    places[block_id] = self.free.pop()
            sequence.block_ids = [places[block_id] for block_id in sequence.cpu_block_ids]
            sequence.cpu_block_ids = []
        self._swap_in += places.items()
        self.free_cpu += places

    def recompute(self, name: str) -> None:
        """All blocks and all progress are lost; prompt and outputs are one prompt now."""
        sequence = self.sequences[name]
        self._release(sequence.block_ids, after=name)
        sequence.block_ids, sequence.num_computed = [], 0

    def share_full_blocks(self, source: str, name: str, num_blocks: int) -> None:
        """`name`, without blocks, takes the first blocks of `source`, which computes them in the same iteration at the latest."""
        sequence = self.sequences[name]
        self._take_blocks(source, len(self.sequences[source].token_ids))
        assert not sequence.block_ids
        sequence.block_ids = self.sequences[source].block_ids[:num_blocks]
        sequence.num_computed = num_blocks * self.block_size

    # ------------------------------------------------------------------ iterations
    def step(
        self,
        names: list[str] | None = None,
        draws: dict[str, dict[str, SamplingParams]] | None = None,
        num_logprobs: int = 0,
        asked: tuple[int, ...] = (),
        sample: bool = True,
    ) -> dict[str, SequenceOutput]:
        """One iteration over `names` (default: all that are not swapped out). `draws`: for a sequence, stream -> parameters; default: its own."""
        names = [n for n, s in self.sequences.items() if not s.cpu_block_ids] if names is None else names
        copies: list[tuple[int, int]] = []
        scheduled = []
        for name in names:
            sequence = self.sequences[name]
            end = len(sequence.token_ids)
            copies += self._copy_on_write(name)
            self._take_blocks(name, end)
            its_draws = (draws or {}).get(name, {name: sequence.params}) if sample else {}
            scheduled.append(
                ScheduledSequence(
                    sequence_id=name,
                    token_ids=tuple(sequence.token_ids),
                    block_ids=tuple(sequence.block_ids),
                    num_computed_tokens=sequence.num_computed,
                    num_scheduled_tokens=end - sequence.num_computed,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_output_tokens=end - sequence.num_prompt_tokens,
                    draws=tuple(its_draws.values()),
                    draw_names=tuple(its_draws),
                    num_logprobs=num_logprobs,
                    token_ids_asked=asked,
                )
            )
        plan = IterationPlan(tuple(scheduled), tuple(self._swap_out), tuple(self._swap_in), () if self._forget_copies else tuple(copies), tuple(self._finished))
        self.plans.append(plan)
        self._swap_out, self._swap_in, self._finished = [], [], []
        outputs = self.runner.execute(plan)
        for name in names:
            sequence = self.sequences[name]
            sequence.num_computed = len(sequence.token_ids)
            if not draws and sample:
                self.append(name, outputs[name].sampled[0].token_id)
        return outputs

    def _refs(self) -> Counter[int]:
        return Counter(block_id for sequence in self.sequences.values() for block_id in sequence.block_ids)

    def _release(self, block_ids: list[int], after: str) -> None:
        others = Counter(b for name, s in self.sequences.items() if name != after for b in s.block_ids)
        self.free += [block_id for block_id in block_ids if not others[block_id]]

    def _copy_on_write(self, name: str) -> list[tuple[int, int]]:
        """The block that the next token falls into, when it holds tokens already and others refer to it."""
        sequence = self.sequences[name]
        index, num_filled = divmod(sequence.num_computed, self.block_size)
        if not num_filled or index >= len(sequence.block_ids) or self._refs()[sequence.block_ids[index]] == 1:
            return []
        source = sequence.block_ids[index]
        sequence.block_ids[index] = self.free.pop()
        return [(source, sequence.block_ids[index])]

    def _take_blocks(self, name: str, num_tokens: int) -> None:
        table = self.sequences[name].block_ids
        while len(table) * self.block_size < num_tokens:
            table.append(self.free.pop())


@torch.inference_mode()
def unshared_logits(reference: PreTrainedModel, token_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
    """The sequence alone through transformers, all tokens in one pass, no cache: float32 [vocab], the logits after its last token."""
    logits: torch.Tensor = reference(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
    return logits


def worst_difference(runner: SequenceRunner, plan: IterationPlan, reference: PreTrainedModel) -> float:
    """Largest difference between the iteration's logits and those of unshared runs; infinity for not-a-number."""
    worst = 0.0
    for sequence in plan.sequences:
        difference = float((runner.last_logits[sequence.sequence_id] - unshared_logits(reference, sequence.token_ids)).abs().max())
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst
