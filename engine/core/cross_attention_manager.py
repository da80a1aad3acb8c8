"""Cross attention: keys and values of the encoder's output, one allocation per request, its own for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from engine.core.kv_cache_spec import KVCacheSpec
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import EngineError


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Manager of a cross-attention group: sized by the encoder's tokens, without hits and without caching. vLLM: CrossAttentionManager."""

    holds_encoder_output: ClassVar[bool] = True

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int, num_external_computed_tokens: int = 0
    ) -> None:
        """Nothing to adopt."""
        if new_computed_blocks:
            raise EngineError(f"request {request_id} cannot adopt cross-attention blocks: they belong to one request")

    def allocate_external_computed_blocks(self, request_id: str, num_computed_tokens: int, num_external_computed_tokens: int) -> None:
        """Nothing: no connector brings encoder states."""

    def cache_blocks(self, request: Request, num_tokens: int, retention_interval: int | None = None) -> None:
        """Raises EngineError: encoder states are not cached."""
        raise EngineError("cross-attention blocks are not cached: turn prefix caching off for a model with an encoder")

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Raises EngineError: nothing is shared."""
        raise EngineError("cross-attention blocks are never shared: turn prefix caching off for a model with an encoder")
