"""The trace events of the prefix cache, made only when somebody records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.block_hash import BlockHash, BlockHashWithGroupId, get_block_hash, get_group_id
from engine.core.kv_cache_block import KVCacheBlock
from engine.trace.events import BlockCached, BlockEvicted, Cause, Emit

if TYPE_CHECKING:
    from engine.core.request import Request


def report_cached(
    emit: Emit,
    request: Request,
    block: KVCacheBlock,
    key: BlockHashWithGroupId,
    parent: BlockHash | None,
    tokens: range,
    duplicates: list[int],
    num_cached_block: int | None,
    cause: Cause,
) -> None:
    """`block` was registered under `key`, whose last tokens are those at the positions `tokens`; the other fields as in BlockCached."""
    emit(
        BlockCached(
            cause=cause,
            request_id=request.request_id,
            group_id=get_group_id(key),
            block_id=block.block_id,
            block_hash=get_block_hash(key).hex(),
            parent_hash=parent.hex() if parent is not None else None,
            token_ids=request.all_token_ids[tokens.start : tokens.stop],
            duplicates=duplicates,
            num_hash_tokens=tokens.stop,
            num_cached_block=num_cached_block,
        )
    )


def report_evicted(emit: Emit, block: KVCacheBlock, key: BlockHashWithGroupId, cause: Cause) -> None:
    """`block` lost `key`."""
    emit(BlockEvicted(cause=cause, group_id=get_group_id(key), block_id=block.block_id, block_hash=get_block_hash(key).hex()))
