"""One step of the engine as the worker sees it: apply the scheduler's plan to the batch, run the model over it, choose tokens."""

from __future__ import annotations

from functools import cached_property

import torch

from engine.core.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SampledToken, SchedulerOutput
from engine.errors import EngineError
from engine.trace.events import CauseKind
from engine.worker.batch_runner import BatchPart, BatchRunner
from engine.worker.input_batch import CachedRequestState
from engine.worker.sampler import check_token_ids, make_generator, sample


class ModelRunner(BatchRunner):
    """V1's worker: follows the scheduler's plan. The arguments are those of `BatchRunner`.

    vLLM: GPUModelRunner; here: one process, no graphs, no speculation, tokens of a step are known before the next is scheduled.
    """

    @cached_property
    def requests(self) -> dict[str, CachedRequestState]:
        """What is remembered of each request that has not finished, in the batch or not."""
        return {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step in the order of R8.6: rows, commit, copies, slots, forward pass, sampling. Mutates the rows, the caches and what is remembered of each
        request, to which a sampled token is appended at once. A request whose known tokens are not all computed yet gets no token.

        Raises InvalidInput for a token id outside the vocabulary, before anything has changed.
        """
        self._check(scheduler_output)
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            self.slot_mapping = ()
            self.last_logits = {}
            return ModelRunnerOutput({})
        self.block_table.commit_block_table(self.input_batch.num_reqs)
        self._change_blocks(scheduler_output)
        parts = self._parts(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(self._sample(parts, self.compute(parts)))

    def _check(self, scheduler_output: SchedulerOutput) -> None:
        """Everything that can be refused, before anything changes."""
        for new in scheduler_output.scheduled_new_reqs:
            check_token_ids(new.prompt_token_ids, self.vocab_size, new.req_id)
            check_token_ids(new.sampling_params.forced_token_ids, self.vocab_size, new.req_id)
        if scheduler_output.total_num_scheduled_tokens > self._max_num_batched_tokens:
            raise EngineError(
                f"{scheduler_output.total_num_scheduled_tokens} tokens are scheduled, but the worker takes {self._max_num_batched_tokens} in one step; "
                "raise max_num_batched_tokens."
            )
        if len(scheduler_output.num_scheduled_tokens) > self._max_num_seqs:
            raise EngineError(
                f"{len(scheduler_output.num_scheduled_tokens)} requests are scheduled, but the block table has {self._max_num_seqs} rows; raise max_num_seqs."
            )

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring requests and rows up to date. vLLM: GPUModelRunner._update_states; here: preempted requests are kept by id until they finish, too."""
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in sorted(scheduler_output.finished_req_ids):
            self.requests.pop(req_id, None)
            self.input_batch.remove_request(req_id)
        # Whoever is not scheduled leaves the batch and keeps its state; a resumed request comes back as if new, with another table.
        staying = scheduler_output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in [r for r in self.input_batch.req_id_to_index if r not in staying]:
            self.input_batch.remove_request(req_id)
        joining = [self._new_request(new) for new in scheduler_output.scheduled_new_reqs]
        joining += self._update_cached(cached)
        for request in joining:
            self.input_batch.add_request(request)
        self.input_batch.condense()

    def _new_request(self, new: NewRequestData) -> CachedRequestState:
        request = CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=list(new.prompt_token_ids),
            sampling_params=new.sampling_params,
            generator=make_generator(new.sampling_params),
            block_ids=tuple(list(ids) for ids in new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
        )
        self.requests[new.req_id] = request
        return request

    def _update_cached(self, cached: CachedRequestData) -> list[CachedRequestState]:
        """Returns the requests that are not in the batch and must join it."""
        joining: list[CachedRequestState] = []
        for req_id, new_block_ids, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self.requests[req_id]
            request.num_computed_tokens = num_computed
            if req_id in cached.resumed_req_ids:
                if new_block_ids is None:
                    raise EngineError(f"Request {req_id} is resumed without a block table; the scheduler must send the full table.")
                request.block_ids = tuple(list(ids) for ids in new_block_ids)
                if req_id in cached.all_token_ids:
                    request.output_token_ids = cached.all_token_ids[req_id][len(request.prompt_token_ids) :]
            elif new_block_ids is not None:
                for ids, new_ids in zip(request.block_ids, new_block_ids, strict=True):
                    ids.extend(new_ids)
            if req_id not in self.input_batch.req_id_to_index:
                joining.append(request)
            elif new_block_ids is not None:
                self.input_batch.append_row(req_id, new_block_ids)
        return joining

    def _change_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Zero, then copy (R6.6): a destination is a new block. A copy is made because a prefix-cache hit ends inside a block (R6.1)."""
        if scheduler_output.new_block_ids_to_zero:
            self.kv_cache.zero_blocks(scheduler_output.new_block_ids_to_zero)
        pairs = scheduler_output.kv_cache_block_copies
        if pairs:
            self._copy_pages(pairs, (self.kernel_settings.backend,) * len(self.kv_cache.layers), CauseKind.COPY_QUEUED)

    def _parts(self, num_scheduled_tokens: dict[str, int]) -> list[BatchPart]:
        """The flattened batch, in order of rows."""
        parts: list[BatchPart] = []
        start = 0
        for req_id in self.input_batch.req_ids:
            assert req_id is not None, "rows are dense after condense"
            request = self.requests[req_id]
            position, count = request.num_computed_tokens, num_scheduled_tokens[req_id]
            token_ids = request.token_ids(position, position + count)
            if len(token_ids) != count:
                raise EngineError(
                    f"{count} tokens of request {req_id} are scheduled from position {position} on, but it has only {request.num_tokens} tokens; "
                    "the scheduler is ahead of the worker."
                )
            parts.append(BatchPart(req_id, start, start + count, position, token_ids))
            start += count
        return parts

    def _sample(self, parts: list[BatchPart], logits: torch.Tensor) -> dict[str, list[SampledToken]]:
        sampled: dict[str, list[SampledToken]] = {}
        for part, row in zip(parts, logits, strict=True):
            request = self.requests[part.req_id]
            request.num_computed_tokens = part.position + part.end - part.start
            sampled[request.req_id] = []
            if request.num_computed_tokens == request.num_tokens:  # else the middle of a prefill: these logits predict a known token
                token = sample(row, request.sampling_params, len(request.output_token_ids), request.generator)
                request.output_token_ids.append(token.token_id)
                sampled[request.req_id].append(token)
        return sampled
