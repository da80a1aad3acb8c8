"""What a session is given: settings, requests, and what is done to the engine while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.core.block_hash import MultiModalFeature
from engine.core.kv_cache_spec import MAMBA_CACHE_MODES, KVCacheGroupSpec
from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.group_config import GroupConfig, describe, group_specs, resolve_kv_cache_block_sizes

ActionKind = Literal["abort", "reset_prefix_cache", "evict_blocks", "arrange_free_queue"]


@dataclass(frozen=True)
class RequestSpec:
    """A request and when it arrives: before engine step `arrival_step` (counted from 1) is scheduled.

    Adapter (`lora_name`, `lora_int_id`), `cache_salt` and `mm_features` keep its blocks apart from those of other requests with the same tokens (R2.4)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    arrival_step: int = 1
    cache_salt: str | None = None
    priority: int = 0
    lora_name: str | None = None
    lora_int_id: int = 1
    mm_features: tuple[MultiModalFeature, ...] = ()


@dataclass(frozen=True)
class ActionSpec:
    """Something done to the engine before step `at_step`: abort `request_id`, reset the prefix cache (R1.14), drop the hashes of `block_ids` (R1.13), or give
    the free queue the order of `block_ids`, which names all that are in it; vLLM has no such operation."""

    at_step: int
    kind: ActionKind
    request_id: str | None = None
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SessionConfig:
    """The engine's settings, with vLLM's names. Sizes in blocks and tokens.

    `free_queue_order`: the pool is prepared so that these ids are popped first, in this order (rule S24). `max_model_len` None: the session's default.
    `kv_cache_groups`: without any there is one full-attention group of `block_size`, or those that a model's layers ask for: `model_groups`, which the session
    fills in. `sliding_window` replaces the window of the model, in tokens; `mamba_cache_mode` says which states of its Mamba layers are kept (None: `align`
    with prefix caching, `none` without; vLLM 0.27.0 would take `all` for Mamba2 layers, and caches no prefix of a hybrid model unless told to).
    `hash_block_size` and `scheduler_block_size` None: by rule R2.6, with
    `prefix_match_unit`. `dcp_rank`: the rank whose memory the frames show, when the tokens of a block are spread over `decode_context_parallel_size` ranks.
    `kernel_witness`: each step says what every kernel program read and wrote, in the layers that run on kernels; None: in small pools.
    `clear_rows`: whether the worker zeroes a row of its block table when the request leaves it (R8.2). vLLM's V1 model runner does; the tables that its V2
    model runner gathers for a batch are only written over, so that behind a short row the end of a longer one stays.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    hash_algo: str = "sha256_cbor"
    hash_seed: str = "0"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    policy: str = "fcfs"
    free_queue_order: tuple[int, ...] = ()
    seed: int = 0
    max_frames: int = 20_000
    kv_cache_groups: tuple[GroupConfig, ...] = ()
    sliding_window: int | None = None
    mamba_cache_mode: str | None = None
    model_groups: tuple[GroupConfig, ...] = ()
    hash_block_size: int | None = None
    scheduler_block_size: int | None = None
    prefix_match_unit: int | None = None
    retention_interval: int | None = None
    use_eagle: bool = False
    async_scheduling: bool = False
    compat: str | None = None
    decode_context_parallel_size: int = 1
    dcp_rank: int = 0
    cp_kv_cache_interleave_size: int = 1
    attention_shares: bool = False
    kernel_witness: bool | None = None
    clear_rows: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidInput for a size below 1, a pool without a usable block, an impossible free queue order, or groups that do not go together."""
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_frames", "decode_context_parallel_size", "cp_kv_cache_interleave_size"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, but it must be at least 1")
        for name in ("max_model_len", "hash_block_size", "scheduler_block_size", "prefix_match_unit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} is {value}, but it must be at least 1")
        if self.num_blocks < 2:
            raise InvalidInput(f"num_blocks is {self.num_blocks}, but block 0 is the null block, so a pool needs at least 2")
        order = self.free_queue_order
        if len(set(order)) != len(order) or any(not 1 <= b < self.num_blocks for b in order):
            raise InvalidInput(f"free_queue_order is {list(order)}, but it must name each block at most once, with ids from 1 to {self.num_blocks - 1}")
        ranks = self.decode_context_parallel_size
        if not 0 <= self.dcp_rank < ranks:
            raise InvalidInput(f"dcp_rank is {self.dcp_rank}, but with decode_context_parallel_size {ranks} the ranks are 0 to {ranks - 1}")
        if self.mamba_cache_mode not in (None, *MAMBA_CACHE_MODES):
            raise InvalidInput(f"there is no mamba_cache_mode “{self.mamba_cache_mode}”; choose one of {', '.join(MAMBA_CACHE_MODES)}")
        if self.kv_cache_groups or self.model_groups:  # else a model's groups may still come (`with_groups_of_model`)
            self.block_sizes()

    def group_specs(self) -> list[KVCacheGroupSpec]:
        """The groups as the core takes them: those that are named, or the model's, or one full-attention group."""
        return group_specs(self.kv_cache_groups or self.model_groups, self.block_size)

    def block_sizes(self) -> tuple[int, int]:
        """scheduler_block_size and hash_block_size: as set, else by rule R2.6."""
        scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(
            [group.kv_cache_spec for group in self.group_specs()],
            self.block_size,
            dcp_world_size=self.decode_context_parallel_size,
            prefix_match_unit=self.prefix_match_unit,
            hashing=self.enable_prefix_caching,
        )
        return self.scheduler_block_size or scheduler_block_size, self.hash_block_size or hash_block_size

    @property
    def plain_full_attention(self) -> bool:
        """Whether there is one full-attention group on one rank: what a real model can run on."""
        return self.decode_context_parallel_size == 1 and [g.type for g in self.kv_cache_groups] in ([], ["full"])

    def described(self) -> Mapping[str, Any]:
        """All settings as plain data for a trace's header, with the groups and the two block sizes as they turn out."""
        scheduler_block_size, hash_block_size = self.block_sizes()
        settings = asdict(self)
        del settings["model_groups"]  # they are the groups
        return {
            **settings,
            "free_queue_order": list(self.free_queue_order),
            "kv_cache_groups": [describe(group) for group in self.group_specs()],
            "scheduler_block_size": scheduler_block_size,
            "hash_block_size": hash_block_size,
        }
