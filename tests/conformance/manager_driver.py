"""Conformance operations on the KV-cache manager."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_coordinator import resolve_block_sizes
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from engine.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.core.output import SamplingParams
from engine.core.request import Request, RequestStatus
from engine.errors import InvalidInput
from tests.conformance.names import Json, Names, map_as_json


def make_spec(group: Json, block_size: int) -> KVCacheSpec:
    """The spec of one entry of a scenario's `groups`."""
    size = group.get("block_size", block_size)
    kind = group["type"]
    if kind == "full":
        return FullAttentionSpec(size)
    if kind == "mla":
        return MLAAttentionSpec(size)
    if kind == "swa":
        return SlidingWindowSpec(size, sliding_window=group["window"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(size, attention_chunk_size=group["chunk"])
    if kind == "rswa":
        return RSWASpec(size, rswa_window=group["window"])
    if kind == "mamba":
        return MambaSpec(size, mamba_cache_mode=group.get("mode", "all"), num_speculative_blocks=group.get("spec_blocks", 0))
    if kind == "cross":
        return CrossAttentionSpec(size)
    if kind == "sink":
        return SinkFullAttentionSpec(size, sink_len=group["sink"])
    raise InvalidInput(f"there is no group type {kind!r}")


class ManagerDriver:
    """Operations on the KV-cache manager; the driver does the scheduler's bookkeeping."""

    def __init__(self, scenario: Json, compat: str | None) -> None:
        self.scenario = scenario
        self.compat = compat
        self.block_size: int = scenario.get("block_size", 16)
        self.caching: bool = scenario.get("enable_caching", True)
        groups = scenario.get("groups", [{"type": "full"}])
        self.num_groups = len(groups)
        self.config = KVCacheConfig(
            scenario["num_blocks"],
            [KVCacheGroupSpec([f"layer{index}"], make_spec(group, self.block_size), group.get("eagle", False)) for index, group in enumerate(groups)],
        )
        sizes = resolve_block_sizes(self.config, scenario.get("hash_block_size"), scenario.get("scheduler_block_size"))
        self.scheduler_block_size, self.hash_block_size = sizes
        self.hasher = BlockHasher(self.hash_block_size, scenario.get("hash_algo", "sha256_cbor"), compat=compat)
        self.names = Names()
        self.requests: dict[str, Request] = {}
        self.scheduled: dict[str, int] = {}
        self.manager = self.build()
        self.pool = self.manager.block_pool

    def build(self) -> KVCacheManager:
        scenario = self.scenario
        return KVCacheManager(
            self.config,
            scenario.get("max_model_len", 8192),
            hash_block_size=self.hash_block_size,
            scheduler_block_size=self.scheduler_block_size,
            max_in_flight_tokens=scenario.get("max_in_flight"),
            retention_interval=scenario.get("retention_interval"),
            enable_caching=self.caching,
            use_eagle=scenario.get("use_eagle", False),
            watermark=scenario.get("watermark", 0.0),
            enable_kv_cache_events=scenario.get("events", True),
            compat=self.compat,
        )

    # ------------------------------------------------------------------ state
    def _learn(self) -> None:
        for request in self.requests.values():
            self.names.learn(request, self.hash_block_size)

    def event_as_json(self, event: KVCacheEvent) -> Json:
        if isinstance(event, BlockStored):
            entry: Json = {
                "type": "BlockStored",
                "hashes": [self.names.of_hash(block_hash) for block_hash in event.block_hashes],
                "parent": self.names.of_hash(event.parent_block_hash),
                "tokens": list(event.token_ids),
                "block_size": event.block_size,
                "group": event.group_idx,
                "medium": event.medium,
            }
            if event.extra_keys and any(event.extra_keys):
                entry["extra_keys"] = [list(keys) if keys else None for keys in event.extra_keys]
            for field in ("kv_cache_spec_kind", "kv_cache_spec_sliding_window"):
                if getattr(event, field) is not None:
                    entry[field] = getattr(event, field)
            return entry
        if isinstance(event, BlockRemoved):
            hashes = [self.names.of_hash(block_hash) for block_hash in event.block_hashes]
            return {"type": "BlockRemoved", "hashes": hashes, "group": event.group_idx, "medium": event.medium}
        assert isinstance(event, AllBlocksCleared)
        return {"type": "AllBlocksCleared"}

    def state(self) -> Json:
        self._learn()
        pool = self.pool

        def name(key: bytes) -> str:
            return self.names.of_key(key, self.num_groups)

        hashed = [block for block in pool.blocks if block.block_hash is not None]
        managers = self.manager.coordinator.single_type_managers
        state: Json = {
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "num_free": pool.get_num_free_blocks(),
            "usage": round(pool.get_usage(), 4),
            "ref": {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null},
            "null_ref": pool.null_block.ref_cnt,
            "hash": {block.block_id: name(block.block_hash) for block in hashed if block.block_hash is not None},
            "hash_tokens": {block.block_id: block.block_hash_num_tokens for block in hashed},
            "extra_hashes": {i: sorted(map(name, keys)) for i, keys in pool.cached_block_hashes_by_block.items() if keys},
            "map": map_as_json(pool, name),
            "requests": {
                request_id: {
                    "status": request.status.name,
                    "num_tokens": request.num_tokens,
                    "computed": request.num_computed_tokens,
                    "n_hashes": len(request.block_hashes),
                    "blocks": [[block.block_id for block in manager.req_to_blocks.get(request_id, [])] for manager in managers],
                    "cached": [manager.num_cached_block.get(request_id) for manager in managers],
                }
                for request_id, request in self.requests.items()
                if not request.is_finished() or any(request_id in manager.req_to_blocks for manager in managers)
            },
        }
        pending = [[(source.block_id, destination.block_id) for source, destination in manager.pending_copies] for manager in managers]
        if any(pending):
            state["pending_copies"] = pending
        events = [self.event_as_json(event) for event in self.manager.take_events()]
        if events:
            state["events"] = events
        return state

    # ------------------------------------------------------------------ operations
    def make_request(self, op: Json) -> Request:
        base = op.get("base", 0)
        request = Request(
            op["id"],
            op["tokens"] if "tokens" in op else range(base, base + op["n"]),
            SamplingParams(max_tokens=op.get("out_max", 1000)),
            arrival_time=op.get("arrival", float(len(self.requests))),
            priority=op.get("priority", 0),
            cache_salt=op.get("salt"),
            lora_name=op.get("lora"),
            block_hasher=self.hasher if self.caching else None,
        )
        self.requests[op["id"]] = request
        self._learn()
        return request

    def op_add(self, op: Json) -> Json:
        return {"n_hashes": len(self.make_request(op).block_hashes)}

    def op_lookup(self, op: Json) -> Json:
        hit = self.manager.get_computed_blocks(self.requests[op["id"]])
        return {"hit_tokens": hit.num_tokens, "hit_blocks": list(hit.blocks.get_block_ids()), "junction": hit.junction}

    def op_start(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        hit = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = hit.junction
        found = {"hit_tokens": hit.num_tokens, "hit_blocks": list(hit.blocks.get_block_ids())}
        num_new_tokens = op.get("new", request.num_tokens - hit.num_tokens)
        new_blocks = self.manager.allocate_slots(
            request,
            num_new_tokens,
            hit.num_tokens,
            hit.blocks,
            op.get("lookahead", 0),
            num_encoder_tokens=op.get("encoder", 0),
            full_sequence_must_fit=op.get("full_fit", True),
            has_scheduled_reqs=op.get("has_scheduled", any(r.status is RequestStatus.RUNNING for r in self.requests.values())),
        )
        if new_blocks is None:
            return {"result": None, **found}
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        self.scheduled[op["id"]] = num_new_tokens
        return {**found, "junction": hit.junction, "new_blocks": self._ids(new_blocks.get_block_ids()), "scheduled": num_new_tokens}

    @staticmethod
    def _ids(groups: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(ids) for ids in groups]

    def op_run(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        num_new_tokens = op.get("new", request.num_tokens - request.num_computed_tokens)
        new_blocks = self.manager.allocate_slots(request, num_new_tokens, num_lookahead_tokens=op.get("lookahead", 0))
        if new_blocks is None:
            return {"result": None}
        self.scheduled[op["id"]] = num_new_tokens
        return {"new_blocks": self._ids(new_blocks.get_block_ids()), "scheduled": num_new_tokens}

    def op_done(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        request.num_computed_tokens += self.scheduled.pop(op["id"])
        if op.get("tokens"):
            request.append_output_token_ids(op["tokens"])
        return {"computed": request.num_computed_tokens, "num_tokens": request.num_tokens}

    def op_decode(self, op: Json) -> Json:
        ran = self.op_run({**op, "new": 1})
        if "scheduled" not in ran:
            return ran
        return {**ran, **self.op_done({"id": op["id"], "tokens": [op["token"]]})}

    def op_free(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        request.status = RequestStatus.FINISHED_STOPPED
        self.manager.free(request)
        return {}

    def op_preempt(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        return {}

    def op_step(self, op: Json) -> Json:
        self.manager.new_step_starts()
        return {}

    def op_copies(self, op: Json) -> Json:
        copies, retained = self.manager.take_kv_cache_block_copies()
        if op.get("release", True):
            self.pool.free_blocks(retained)
        return {"copies": copies, "retained": [block.block_id for block in retained]}

    def op_reset(self, op: Json) -> Json:
        return {"ok": self.manager.reset_prefix_cache()}

    def op_evict(self, op: Json) -> Json:
        self.manager.evict_blocks(set(op["ids"]))
        return {}

    def op_cache(self, op: Json) -> Json:
        self.manager.cache_blocks(self.requests[op["id"]], op["n"])
        return {}

    def op_skip(self, op: Json) -> Json:
        request = self.requests[op["id"]]
        self.manager.remove_skipped_blocks(op["id"], op["n"], request.num_prompt_tokens)
        return {}

    def op_common(self, op: Json) -> Json:
        return {"common": self.manager.get_num_common_prefix_blocks(op["id"])}
