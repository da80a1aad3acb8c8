"""Readable names for hashes, and the prefix cache in those names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from engine.core.block_hash import get_block_hash, get_group_id
from engine.core.block_pool import BlockPool
from engine.core.request import Request

Json: TypeAlias = dict[str, Any]


class Names:
    """Readable, stable names of hashes: '<first request that had this prefix>@<its length>'."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}

    def learn(self, request: Request, hash_block_size: int) -> None:
        for index, block_hash in enumerate(request.block_hashes):
            self._names.setdefault(block_hash, f"{request.request_id}@{(index + 1) * hash_block_size}")

    def of_hash(self, block_hash: bytes | None) -> str | None:
        return None if block_hash is None else self._names.get(block_hash, block_hash.hex()[:8])

    def of_key(self, key: bytes, num_groups: int) -> str:
        name = self.of_hash(get_block_hash(key)) or ""
        return name if num_groups == 1 else f"{name}/g{get_group_id(key)}"


def map_as_json(pool: BlockPool, name: Callable[[bytes], str]) -> Json:
    cache = pool.cached_block_hash_to_block
    return {name(key): ids if cache.has_several(key) else ids[0] for key, ids in cache.items()}
