"""Conformance operations on a bare block pool."""

from __future__ import annotations

from engine.core.block_hash import get_block_hash, make_block_hash_with_group_id
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_block import KVCacheBlock
from tests.conformance.names import Json, map_as_json


class PoolDriver:
    """Operations on a bare block pool."""

    def __init__(self, scenario: Json, compat: str | None) -> None:
        self.pool = BlockPool(
            scenario["num_blocks"],
            scenario.get("enable_caching", True),
            scenario.get("block_size", 4),
            enable_kv_cache_events=True,
            compat=compat,
        )

    @staticmethod
    def _name(key: bytes) -> str:
        return get_block_hash(key).rstrip(b"\0").decode()

    def state(self) -> Json:
        pool = self.pool
        return {
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "num_free": pool.get_num_free_blocks(),
            "usage": round(pool.get_usage(), 4),
            "ref": {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt},
            "hash": {block.block_id: self._name(block.block_hash) for block in pool.blocks if block.block_hash is not None},
            "map": map_as_json(pool, self._name),
            "events": [type(event).__name__ for event in pool.take_events()],
        }

    def _blocks(self, op: Json) -> list[KVCacheBlock]:
        return [self.pool.blocks[block_id] for block_id in op["ids"]]

    def op_get(self, op: Json) -> Json:
        return {"ids": [block.block_id for block in self.pool.get_new_blocks(op["n"])]}

    def op_touch(self, op: Json) -> Json:
        self.pool.touch(self._blocks(op))
        return {}

    def op_free(self, op: Json) -> Json:
        self.pool.free_blocks(self._blocks(op))
        return {}

    def op_hash(self, op: Json) -> Json:
        key = make_block_hash_with_group_id(op["label"].encode().ljust(8, b"\0"), 0)
        self.pool.insert_block_hash(key, self.pool.blocks[op["id"]], op.get("tokens"))
        return {}

    def op_evict(self, op: Json) -> Json:
        self.pool.evict_blocks(set(op["ids"]))
        return {}

    def op_reset(self, op: Json) -> Json:
        return {"ok": self.pool.reset_prefix_cache()}

    def op_lookup(self, op: Json) -> Json:
        found = self.pool.get_cached_block(op["label"].encode().ljust(8, b"\0"), [0])
        return {"block": found[0].block_id if found else None}
