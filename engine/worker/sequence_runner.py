"""One iteration of the paper's engine as the worker sees it: swap, copy, run the model over the sequences, draw tokens or report log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from engine.errors import EngineError
from engine.iteration_check import check_plan
from engine.paper.config import PaperConfig
from engine.paper.step import IterationPlan, ScheduledSequence, SequenceOutput
from engine.trace.events import BlocksCopied, Cause, CauseKind, Emit
from engine.worker.batch_runner import BatchPart, BatchRunner
from engine.worker.kernel_settings import KernelSettings
from engine.worker.sampler import check_token_ids, make_generator, sample, top_logprobs
from engine.worker.swap_space import SwapSpace


class SequenceRunner(BatchRunner):
    """The worker of the paper's engine: `engine.paper.step.IterationRunner` on a real model and a real paged KV cache.

    `config` gives pool, block size, swap space and batch limits; `max_model_len`: longest sequence, in tokens. The other arguments are those of
    `BatchRunner`. `last_logits`: of the last iteration, float32 [vocab] per sequence. Sequences that are not in an iteration leave the batch and come back
    with their whole table.

    Raises what `BatchRunner` raises. vLLM's first release: Worker.execute_model and CacheEngine; here: sequences that share blocks are plain rows of one
    ragged batch, and what beam search needs is answered as log-probabilities, from which the scheduler chooses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: PaperConfig,
        max_model_len: int,
        kernel_settings: KernelSettings,
        emit: Emit | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            model,
            num_blocks=config.num_blocks,
            block_sizes=(config.block_size,),
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kernel_settings=kernel_settings,
            emit=emit,
            device=device,
            attention_shares=config.attention_shares,
            kernel_witness=config.kernel_witness,
        )
        self.swap_space = SwapSpace(self.kv_cache, config.num_cpu_blocks)
        self._block_size = config.block_size
        self._streams: dict[str, torch.Generator] = {}

    def execute(self, plan: IterationPlan) -> dict[str, SequenceOutput]:
        """Rows, swaps out, swaps in, copies, slots, forward pass, then draws and log-probabilities; answers for every scheduled sequence.

        Mutates rows, caches, swap space and the streams of random numbers, of which those of finished sequences are dropped. Raises InvalidInput for a token id
        outside the vocabulary and EngineError for a plan that cannot be run, both before anything has changed.
        """
        self._check(plan)
        for sequence_id in plan.finished:
            self._streams.pop(sequence_id, None)
        self._update_rows(plan.sequences)
        self.swap_space.swap_out(plan.swap_out)
        self.swap_space.swap_in(plan.swap_in)
        self._copy(plan.copies)
        if not plan.sequences:
            self.slot_mapping, self.last_logits = (), {}
            return {}
        self.block_table.commit_block_table(self.input_batch.num_reqs)
        sequences = {sequence.sequence_id: sequence for sequence in plan.sequences}
        logits = self.compute(self._parts(sequences))
        answers = {name: self._answer(sequences[name], row) for name, row in zip(self._batch(), logits, strict=True)}
        return {name: answers[name] for name in sequences}

    def _check(self, plan: IterationPlan) -> None:
        for sequence in plan.sequences:
            check_token_ids(sequence.token_ids, self.vocab_size, sequence.sequence_id)
            check_token_ids(sequence.token_ids_asked, self.vocab_size, sequence.sequence_id)
            for params in sequence.draws:
                check_token_ids(params.forced_token_ids, self.vocab_size, sequence.sequence_id)
        check_plan(plan, block_size=self._block_size, num_blocks=self.kv_cache.num_blocks)
        num_tokens = sum(sequence.num_scheduled_tokens for sequence in plan.sequences)
        if num_tokens > self._max_num_batched_tokens:
            raise EngineError(
                f"{num_tokens} tokens are scheduled, but the worker takes {self._max_num_batched_tokens} in one iteration; raise max_num_batched_tokens."
            )
        if len(plan.sequences) > self._max_num_seqs:
            raise EngineError(f"{len(plan.sequences)} sequences are scheduled, but the block table has {self._max_num_seqs} rows; raise max_num_seqs.")

    def _update_rows(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Rows as the plan has the tables (R8.2). Whoever is not scheduled leaves first, so that its row can be taken."""
        staying = {sequence.sequence_id for sequence in sequences}
        for sequence_id in [name for name in self._batch() if name not in staying]:
            self.input_batch.remove_request(sequence_id)
        for sequence in sequences:
            if sequence.sequence_id in self.input_batch.req_id_to_index:
                self.input_batch.update_row(sequence.sequence_id, sequence.block_ids)
            else:
                self.input_batch.add_row(sequence.sequence_id, (sequence.block_ids,))
        self.input_batch.condense()

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy-on-write (section 4.4): each layer's pages by the kernel that runs the layer."""
        if not pairs:
            return
        for backend in dict.fromkeys(self._layer_backends):
            self.kv_cache.copy_blocks(pairs, backend, [layer for layer, its in enumerate(self._layer_backends) if its == backend])
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        self._emit(BlocksCopied(cause=Cause(CauseKind.SHARED_BLOCK_WRITTEN), source_block_ids=sources, destination_block_ids=destinations))

    def _batch(self) -> list[str]:
        """The sequences in order of rows."""
        return [name for name in self.input_batch.req_ids if name is not None]

    def _parts(self, sequences: dict[str, ScheduledSequence]) -> list[BatchPart]:
        parts: list[BatchPart] = []
        start = 0
        for name in self._batch():
            sequence = sequences[name]
            position, end = sequence.num_computed_tokens, start + sequence.num_scheduled_tokens
            parts.append(BatchPart(name, start, end, position, sequence.token_ids[position : position + sequence.num_scheduled_tokens]))
            start = end
        return parts

    def _answer(self, sequence: ScheduledSequence, logits: torch.Tensor) -> SequenceOutput:
        sampled = []
        for params, name in zip(sequence.draws, sequence.draw_names, strict=True):
            if name not in self._streams:
                self._streams[name] = make_generator(params)
            sampled.append(sample(logits, params, sequence.num_output_tokens, self._streams[name]))
        return SequenceOutput(tuple(sampled), top_logprobs(logits, sequence.num_logprobs, sequence.token_ids_asked))
