"""What the block pool reports to the outside about its prefix cache (R9.1): stored, removed, cleared; nothing else.

Block ids, touching, freeing and reference counts are not reported (R9.2). These are the events of vLLM's own wire format; the events that
explain a run to a person are another thing (`engine.trace.events`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from engine.core.block_hash import BlockHash, ExtraKeys

MEDIUM_GPU = "GPU"


@dataclass(frozen=True)
class BlockStored:
    """The full blocks of one caching call. `parent_block_hash`: hash before the first of them, None at the start of a request. `token_ids` cover the
    whole range even where blocks were skipped, so they may be longer than `block_hashes` times `block_size` (in tokens). `extra_keys`: per block.
    vLLM: BlockStored; here: hashes are raw bytes, `external_block_hash` gives the wire's integers."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """One key left the cache: once per physical block, so a subscriber has to count (R9.2). vLLM: BlockRemoved."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """The prefix cache was reset. vLLM: AllBlocksCleared."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def external_block_hash(block_hash: BlockHash) -> int:
    """The low 64 bits as an unsigned integer: the default form of a hash on the wire (R9.3)."""
    return int.from_bytes(block_hash[-8:], "big")
