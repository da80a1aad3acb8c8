"""A model over a paged KV cache, one ragged batch at a time: what the runners of both engines, V1's and the paper's, share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.errors import EngineError, InvalidInput
from engine.state_steps import state_steps
from engine.trace.events import AttentionComputed, BlocksCopied, Cause, CauseKind, Emit, Event, Fact, KVWritten, SlotsMapped, StateWritten
from engine.trace.frame import WorkerRow
from engine.worker.attention import ForwardContext, attention_layers_of, layer_shapes, redirect_attention
from engine.worker.block_table import MultiGroupBlockTable
from engine.worker.input_batch import InputBatch
from engine.worker.kernel_settings import KernelSettings, agrees_within
from engine.worker.kernel_witness import LayerLaunch, report, report_mappings
from engine.worker.kv_cache import KVCache
from engine.worker.layer_capture import LayerCapture
from engine.worker.mamba_mixer import STATE_BACKEND, StateMetadata, StateRequest
from engine.worker.model_check import check_dtype, check_windows, memory_in_words
from engine.worker.output_projection import last_token_logits
from kernels import AttentionMetadata, Backend, MappingWitness, Witness


@dataclass(frozen=True)
class BatchPart:
    """One request's part of the flattened batch: tokens start..end-1 of the batch are its positions position..position+(end-start)-1."""

    req_id: str
    start: int
    end: int
    position: int
    token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + self.num_tokens))


class BatchRunner:
    """Runs `model` (float32, eval) over a paged KV cache of `num_blocks` blocks.

    `block_sizes`: tokens per block, per KV-cache group; `layer_groups`: group of every layer (default: all in group 0). `sliding_windows`: per group, the
    tokens for which it keeps blocks (None: all, also the default). `mamba_cache_modes`: per group, how it keeps recurrent states (None: it has keys and values,
    also the default). `max_num_batched_tokens`: most tokens of one step. `emit`: called after each change, in
    the order in which things happen; None records nothing. `attention_shares`: every AttentionComputed also says how much attention each logical block gets,
    in the first compared layer, else in the first that has attention. `kernel_witness`: it also says what every kernel program read and wrote, in the layers
    that run on kernels. Several runners may share one model object, also from several threads; building one redirects the model's attention, so that the
    model no longer runs outside a runner. torch's thread count is the process's business and is left alone (one thread is the steadiest on small machines).

    Raises InvalidInput for sizes that cannot be, EngineError for a model whose attention cannot be redirected.
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
        sliding_windows: Sequence[int | None] | None = None,
        attention_shares: bool = False,
        kernel_witness: bool = False,
        mamba_cache_modes: Sequence[str | None] | None = None,
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
        attention_layers = attention_layers_of(model)
        self._layer_backends = kernel_settings.layer_backends(num_layers, attention_layers)
        self._compared_layers = kernel_settings.compared_layers(num_layers, attention_layers)
        groups = [0] * num_layers if layer_groups is None else list(layer_groups)
        if len(groups) != num_layers:
            raise InvalidInput(f"The KV-cache groups name {len(groups)} layers, but the model has {num_layers}; name each layer once.")
        self._mamba_cache_modes = tuple(mamba_cache_modes) if mamba_cache_modes is not None else (None,) * len(block_sizes)
        state_groups = [group_id for group_id, mode in enumerate(self._mamba_cache_modes) if mode is not None]
        windows = sliding_windows if sliding_windows is not None else [None] * len(block_sizes)
        check_dtype(model)
        check_windows(model, groups, windows)
        shapes = layer_shapes(model, groups, windows, state_groups)
        redirect_attention(model)
        self.model = model
        self.kernel_settings = kernel_settings
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.kv_cache = KVCache(
            num_blocks=num_blocks,
            block_sizes=block_sizes,
            layers=shapes,
            dtype=model.dtype,
            device=device,
        )
        self.block_table = MultiGroupBlockTable(
            block_sizes=block_sizes,
            max_num_reqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            device=device,
            state_groups=state_groups,
        )
        self._slot_groups = [group_id for group_id in range(len(block_sizes)) if group_id not in state_groups]
        backends = [[backend for backend, its in zip(self._layer_backends, groups, strict=True) if its == group_id] for group_id in range(len(block_sizes))]
        self._mapping_backends = [next((b for b in its if b.name != "torch"), kernel_settings.backend) for its in backends]
        self.input_batch = InputBatch(self.block_table, emit)
        self.slot_mapping: tuple[int, ...] = ()
        """Slot per token of the last step's batch, in the first group that has slots."""
        self.last_logits: dict[str, torch.Tensor] = {}
        """Per request of the last step: float32 [vocab], the logits of its last scheduled token."""
        self.layer_capture: LayerCapture | None = None
        """Keeps what one attention layer is given in each forward pass; None: nobody asks."""
        self._shares_layer = next(iter(self._compared_layers), attention_layers[0]) if attention_shares else None
        self._shares_group = self.kv_cache.layers[self._shares_layer].group_id if self._shares_layer is not None and len(block_sizes) > 1 else None
        self._wants_witness = kernel_witness and emit is not None
        self._emit_or_none = emit
        self._device = torch.device(device)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs

    def rows(self) -> tuple[WorkerRow, ...]:
        """The occupied rows of the block table, ascending, as the host has them now."""
        return self.input_batch.rows()

    def compute(self, parts: list[BatchPart]) -> torch.Tensor:
        """Slots and forward pass of a batch (the second half of R8.6): writes the caches, fills `slot_mapping` and `last_logits`, reports.

        `parts`: in the order of rows, whose block tables are committed. Returns the logits of each part's last token: float32 [len(parts), vocab].
        """
        num_reqs = len(parts)
        input_ids = self._tensor([t for part in parts for t in part.token_ids], torch.int64)
        positions = self._tensor([p for part in parts for p in part.positions], torch.int64)
        query_start_loc = self._tensor([0, *(part.end for part in parts)], torch.int32)
        seq_lens = self._tensor([part.position + part.num_tokens for part in parts], torch.int32)
        mappings = self._map_slots(num_reqs, query_start_loc, positions)
        num_tokens = len(input_ids)
        slots = {group_id: self.block_table[group_id].slot_mapping[:num_tokens].tolist() for group_id in self._slot_groups}
        self.slot_mapping = tuple(slots[self._slot_groups[0]])
        states = self._states(parts)
        self._report_slots(parts, slots)
        context = ForwardContext(
            kv_cache=self.kv_cache,
            attention_metadata=[
                AttentionMetadata(
                    block_table=table.block_table[:num_reqs],
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    slot_mapping=table.slot_mapping[:num_tokens],
                    max_seq_len=max(part.position + part.num_tokens for part in parts),
                )
                for table in self.block_table.block_tables
            ],
            layer_backends=self._layer_backends,
            compared_layers=self._compared_layers,
            shares_layer=self._shares_layer,
            wants_witness=self._wants_witness,
            capture=self.layer_capture,
            state_metadata=[StateMetadata(states[g], self._device) if g in states else None for g in range(len(self.block_table))],
        )
        logits = self._forward(input_ids, positions, query_start_loc, context)
        for group_id in range(len(self.block_table)):
            if group_id in states:
                self._report_states(parts, group_id, states[group_id])
            else:
                self._report_written(parts, group_id, slots[group_id])
        self._report_attention(parts, slots, context, mappings)
        self.last_logits = {part.req_id: row for part, row in zip(parts, logits, strict=True)}
        return logits

    def _map_slots(self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> dict[int, MappingWitness]:
        """Each group's slots, by a kernel where one of its layers runs on kernels. Returns what the kernels' programs were seen to do, by group."""
        seen: dict[int, MappingWitness] = {}
        for group_id in self._slot_groups:
            witness = Witness() if self._wants_witness else None
            self.block_table[group_id].compute_slot_mapping(num_reqs, query_start_loc, positions, self._mapping_backends[group_id], witness)
            seen.update((group_id, launch) for launch in (witness.mappings if witness is not None else ()))
        return seen

    def _states(self, parts: list[BatchPart]) -> dict[int, list[StateRequest]]:
        """Per group of recurrent states, which states the batch reads and writes; by the host's rows, which are those that were committed."""
        return {
            group_id: [
                StateRequest(part.start, part.end, tuple(state_steps(table.row(row), table.block_size, mode, part.position, part.position + part.num_tokens)))
                for row, part in enumerate(parts)
            ]
            for group_id, (table, mode) in enumerate(zip(self.block_table.block_tables, self._mamba_cache_modes, strict=True))
            if mode is not None
        }

    def _copy_pages(self, pairs: Sequence[tuple[int, int]], backends: Sequence[Backend], cause: CauseKind) -> None:
        """Copy whole pages of each memory, by the backend that its first layer has among `backends`, and report what the kernels' programs were seen to do."""
        launches: list[LayerLaunch] = []
        for backend in dict.fromkeys(backends[layer] for layer in self.kv_cache.one_layer_of):
            layers = [layer for layer in self.kv_cache.one_layer_of if backends[layer] == backend]
            witness = Witness() if self._wants_witness else None
            self.kv_cache.copy_blocks(pairs, backend, layers, witness)
            for layer, launch in zip(layers, witness.launches if witness is not None else (), strict=witness is not None):
                launches.append(LayerLaunch(layer, self.kv_cache.layers[layer].group_id, None, launch))
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        self._emit(BlocksCopied(cause=Cause(cause), source_block_ids=sources, destination_block_ids=destinations, witness=report(launches, ())))

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, query_start_loc: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Logits of each request's last scheduled token: float32 [num_reqs, vocab]."""
        with torch.inference_mode(), memory_in_words(len(input_ids), self._device):
            logits = last_token_logits(
                self.model,
                query_start_loc[1:].long() - 1,
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                forward_context=context,
            )
        if sorted(context.layers_run) != list(range(len(self.kv_cache.layers))):
            raise EngineError(
                f"Only the layers {sorted(context.layers_run)} of {type(self.model).__name__} went through the paged KV cache, not all "
                f"{len(self.kv_cache.layers)}; choose a llama-, qwen- or gemma-like model."
            )
        return logits

    def _report_slots(self, parts: list[BatchPart], slots: Mapping[int, list[int]]) -> None:
        for group_id, group_slots in slots.items():
            for part in parts:
                self._emit(
                    SlotsMapped(
                        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP),
                        request_id=part.req_id,
                        group_id=group_id,
                        positions=part.positions,
                        slots=group_slots[part.start : part.end],
                        token_ids=list(part.token_ids),
                    )
                )

    def _report_written(self, parts: list[BatchPart], group_id: int, slots: list[int]) -> None:
        for part in parts:
            self._emit(
                KVWritten(
                    cause=Cause(CauseKind.SLOT_MAPPING),
                    request_id=part.req_id,
                    group_id=group_id,
                    slots=slots[part.start : part.end],
                    token_ids=list(part.token_ids),
                    num_layers=self._num_layers(group_id),
                    backend=self.kernel_settings.backend.name,
                )
            )

    def _report_states(self, parts: list[BatchPart], group_id: int, requests: list[StateRequest]) -> None:
        for part, request in zip(parts, requests, strict=True):
            for step in request.steps:
                self._emit(
                    StateWritten(
                        cause=Cause(CauseKind.BLOCK_TABLE_LOOKUP),
                        request_id=part.req_id,
                        group_id=group_id,
                        **step._asdict(),
                        num_layers=self._num_layers(group_id),
                        backend=STATE_BACKEND,
                    )
                )

    def _num_layers(self, group_id: int) -> int:
        return sum(layer.group_id == group_id for layer in self.kv_cache.layers)

    def _report_attention(
        self, parts: list[BatchPart], slots: Mapping[int, list[int]], context: ForwardContext, mappings: Mapping[int, MappingWitness]
    ) -> None:
        ends = [(part.end, part.req_id) for part in parts]
        witness = report(context.launches, ends)
        layers = list(self._compared_layers)
        facts: dict[str, Fact] = {"layer": layers[0]} if len(layers) == 1 else {"layers": layers}
        self._emit(
            AttentionComputed(
                cause=Cause(CauseKind.COMPARED_WITH_REFERENCE, facts),
                group_id=self._shares_group,
                backend=self.kernel_settings.backend.name,
                layers=layers,
                agrees_within=None if context.max_difference is None else agrees_within(context.max_difference),
                query_lens=[part.num_tokens for part in parts],
                seq_lens=[part.position + part.num_tokens for part in parts],
                request_ids=[part.req_id for part in parts],
                block_shares=context.shares.blocks,
                head_shares=context.shares.heads,
                shares_layer=context.shares_layer,
                witness=witness,
                mapping_witness=report_mappings(mappings, ends),
                slot_mappings=dict(slots) if witness is not None and len(self.block_table) > 1 else {},
            )
        )

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _emit(self, event: Event) -> None:
        if self._emit_or_none is not None:
            self._emit_or_none(event)
