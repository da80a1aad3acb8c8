"""One step of the engine as the worker sees it: apply the scheduler's plan to the batch, run the model over it, choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.core.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SampledToken, SchedulerOutput
from engine.errors import EngineError, InvalidInput
from engine.trace.events import AttentionComputed, BlocksCopied, Cause, CauseKind, Emit, Event, Fact, KVWritten, SlotsMapped
from engine.trace.frame import WorkerRow
from engine.worker.attention import ForwardContext, layer_shapes, redirect_attention
from engine.worker.block_table import MultiGroupBlockTable
from engine.worker.input_batch import CachedRequestState, InputBatch
from engine.worker.kernel_settings import KernelSettings, agrees_within
from engine.worker.kv_cache import KVCache
from engine.worker.sampler import check_token_ids, make_generator, sample
from kernels import AttentionMetadata


@dataclass(frozen=True)
class _Share:
    """One request's part of the flattened batch: tokens start..end-1 of the batch are its positions position..position+(end-start)-1."""

    request: CachedRequestState
    start: int
    end: int
    position: int
    token_ids: list[int]

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + self.end - self.start))


class ModelRunner:
    """Runs `model` (float32, eval) over a paged KV cache of `num_blocks` blocks.

    `block_sizes`: tokens per block, per KV-cache group; `layer_groups`: group of every layer (default: all in group 0). `max_num_batched_tokens`: most
    tokens of one step. `emit`: called after each change, in the order in which things happen; None records nothing.
    Several runners may share one model object, also from several threads; building one redirects the model's attention, so that the model no longer
    runs outside a runner. torch's thread count is the process's business and is left alone (one thread is the steadiest on small machines).

    Raises InvalidInput for sizes that cannot be, EngineError for a model whose attention cannot be redirected.
    vLLM: GPUModelRunner; here: one process, no graphs, no speculation, tokens of a step are known before the next is scheduled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_sizes: tuple[int, ...],
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        kernel_settings: KernelSettings,
        emit: Emit | None = None,
        device: torch.device | str = "cpu",
        layer_groups: Sequence[int] | None = None,
    ) -> None:
        for name, size in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len), ("max_num_batched_tokens", max_num_batched_tokens)):
            if size < 1:
                raise InvalidInput(f"{name} is {size}, but must be at least 1; give a larger number.")
        config = model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and max_model_len > limit:
            raise InvalidInput(f"max_model_len is {max_model_len}, but the model knows only {limit} positions; give at most {limit}.")
        if model.device.type != torch.device(device).type:
            raise InvalidInput(f"The model lies on {model.device}, but the KV cache is to lie on {device}; put both on the same device.")
        num_layers = int(config.num_hidden_layers)
        self._layer_backends = kernel_settings.layer_backends(num_layers)
        self._compared_layers = kernel_settings.compared_layers(num_layers)
        redirect_attention(model)
        self.model = model
        self.kernel_settings = kernel_settings
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.kv_cache = KVCache(
            num_blocks=num_blocks,
            block_sizes=block_sizes,
            layers=layer_shapes(model, layer_groups if layer_groups is not None else [0] * num_layers),
            dtype=model.dtype,
            device=device,
        )
        self.block_table = MultiGroupBlockTable(
            block_sizes=block_sizes,
            max_num_reqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            device=device,
        )
        self.input_batch = InputBatch(self.block_table, emit)
        self.requests: dict[str, CachedRequestState] = {}
        self.slot_mapping: tuple[int, ...] = ()
        """Slot per token of the last step's batch, in group 0."""
        self.last_logits: dict[str, torch.Tensor] = {}
        """Per request of the last step: float32 [vocab], the logits of its last scheduled token."""
        self._emit_or_none = emit
        self._device = torch.device(device)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows of the block table, ascending, as the host has them now."""
        return self.input_batch.rows()

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
        num_reqs = self.input_batch.num_reqs
        self.block_table.commit_block_table(num_reqs)
        self._change_blocks(scheduler_output)
        shares = self._shares(scheduler_output.num_scheduled_tokens)
        input_ids = self._tensor([t for share in shares for t in share.token_ids], torch.int64)
        positions = self._tensor([p for share in shares for p in share.positions], torch.int64)
        query_start_loc = self._tensor([0, *(share.end for share in shares)], torch.int32)
        seq_lens = self._tensor([share.position + share.end - share.start for share in shares], torch.int32)
        self.block_table.compute_slot_mapping(num_reqs, query_start_loc, positions, self.kernel_settings.backend)
        num_tokens = len(input_ids)
        slots = [table.slot_mapping[:num_tokens].tolist() for table in self.block_table.block_tables]
        self.slot_mapping = tuple(slots[0])
        self._report_slots(shares, slots)
        context = ForwardContext(
            kv_cache=self.kv_cache,
            attention_metadata=[
                AttentionMetadata(
                    block_table=table.block_table[:num_reqs],
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    slot_mapping=table.slot_mapping[:num_tokens],
                )
                for table in self.block_table.block_tables
            ],
            layer_backends=self._layer_backends,
            compared_layers=self._compared_layers,
        )
        logits = self._forward(input_ids, positions, query_start_loc, context)
        self._report_forward(shares, slots, context)
        self.last_logits = {share.request.req_id: row for share, row in zip(shares, logits, strict=True)}
        return ModelRunnerOutput(self._sample(shares, logits))

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
            self.kv_cache.copy_blocks(pairs, self.kernel_settings.backend)
            self._emit(BlocksCopied(cause=Cause(CauseKind.COPY_QUEUED), source_block_ids=[s for s, _ in pairs], destination_block_ids=[d for _, d in pairs]))

    def _shares(self, num_scheduled_tokens: dict[str, int]) -> list[_Share]:
        """The flattened batch, in order of rows."""
        shares: list[_Share] = []
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
            shares.append(_Share(request, start, start + count, position, token_ids))
            start += count
        return shares

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, query_start_loc: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Logits of each request's last scheduled token: float32 [num_reqs, vocab]."""
        with torch.inference_mode():
            output = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=query_start_loc[1:].long() - 1,
                forward_context=context,
            )
        if sorted(context.layers_run) != list(range(len(self.kv_cache.layers))):
            raise EngineError(
                f"Only the layers {sorted(context.layers_run)} of {type(self.model).__name__} went through the paged KV cache, not all "
                f"{len(self.kv_cache.layers)}; choose a llama-, qwen- or gemma-like model."
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _sample(self, shares: list[_Share], logits: torch.Tensor) -> dict[str, list[SampledToken]]:
        sampled: dict[str, list[SampledToken]] = {}
        for share, row in zip(shares, logits, strict=True):
            request = share.request
            request.num_computed_tokens = share.position + share.end - share.start
            sampled[request.req_id] = []
            if request.num_computed_tokens == request.num_tokens:  # else the middle of a prefill: these logits predict a known token
                token = sample(row, request.sampling_params, len(request.output_token_ids), request.generator)
                request.output_token_ids.append(token.token_id)
                sampled[request.req_id].append(token)
        return sampled

    def _report_slots(self, shares: list[_Share], slots: list[list[int]]) -> None:
        for group_id, group_slots in enumerate(slots):
            for share in shares:
                self._emit(
                    SlotsMapped(
                        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP),
                        request_id=share.request.req_id,
                        group_id=group_id,
                        positions=share.positions,
                        slots=group_slots[share.start : share.end],
                        token_ids=share.token_ids,
                    )
                )

    def _report_forward(self, shares: list[_Share], slots: list[list[int]], context: ForwardContext) -> None:
        backend = self.kernel_settings.backend.name
        for group_id, group_slots in enumerate(slots):
            for share in shares:
                self._emit(
                    KVWritten(
                        cause=Cause(CauseKind.SLOT_MAPPING),
                        request_id=share.request.req_id,
                        group_id=group_id,
                        slots=group_slots[share.start : share.end],
                        token_ids=share.token_ids,
                        num_layers=sum(layer.group_id == group_id for layer in self.kv_cache.layers),
                        backend=backend,
                    )
                )
        layers = list(self._compared_layers)
        facts: dict[str, Fact] = {"layer": layers[0]} if len(layers) == 1 else {"layers": layers}
        self._emit(
            AttentionComputed(
                cause=Cause(CauseKind.COMPARED_WITH_REFERENCE, facts),
                backend=backend,
                layers=layers,
                agrees_within=None if context.max_difference is None else agrees_within(context.max_difference),
                query_lens=[share.end - share.start for share in shares],
                seq_lens=[share.position + share.end - share.start for share in shares],
                request_ids=[share.request.req_id for share in shares],
            )
        )

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _emit(self, event: Event) -> None:
        if self._emit_or_none is not None:
            self._emit_or_none(event)
