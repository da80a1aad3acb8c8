"""Drive the engine's block stack through conformance scenarios and print the states it goes through.

    python tests/conformance/drive.py SCENARIOS.json > out.json

Input and output are those of the recorded runs of vLLM beside this file: scenarios.json, golden_traces.json. A scenario that the engine cannot
build ends with one step BUILD. `why_unsupported` says which those are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.core.block_hash import BlockHasher, get_block_hash, get_group_id, make_block_hash_with_group_id
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from engine.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.errors import InvalidInput
from engine.trace.events import Cause, CauseKind

Json = dict[str, Any]


def why_unsupported(scenario: Json) -> str | None:
    """What the engine lacks for this scenario, None if nothing."""
    groups = scenario.get("groups", [{"type": "full"}])
    types = [group["type"] for group in groups]
    if any(kind != "full" for kind in types):
        return "attention types besides full: " + ", ".join(sorted(set(types) - {"full"}))
    if len(groups) > 1 and scenario.get("enable_caching", True):
        return "several groups with prefix caching"
    if scenario.get("async"):
        return "asynchronous scheduling"
    return None


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


def map_as_json(pool: BlockPool, name: Any) -> Json:
    cache = pool.cached_block_hash_to_block
    return {name(key): ids if cache.has_several(key) else ids[0] for key, ids in cache.items()}


class PoolDriver:
    """Operations on a bare block pool."""

    def __init__(self, scenario: Json) -> None:
        self.pool = BlockPool(
            scenario["num_blocks"],
            scenario.get("enable_caching", True),
            scenario.get("block_size", 4),
            enable_kv_cache_events=True,
            strict=False,
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
            "ref": {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null},
            "hash": {block.block_id: self._name(block.block_hash) for block in pool.blocks if block.block_hash is not None},
            "map": map_as_json(pool, self._name),
            "events": [type(event).__name__ for event in pool.take_events()],
        }

    def _blocks(self, op: Json) -> list[Any]:
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


def make_spec(group: Json, block_size: int) -> KVCacheSpec:
    if group["type"] != "full":
        raise InvalidInput(f"attention type {group['type']!r} is not supported")
    return FullAttentionSpec(group.get("block_size", block_size))


class ManagerDriver:
    """Operations on the KV-cache manager; the driver does the scheduler's bookkeeping."""

    def __init__(self, scenario: Json) -> None:
        reason = why_unsupported(scenario)
        if reason is not None:
            raise InvalidInput(f"not supported: {reason}")
        self.scenario = scenario
        self.block_size: int = scenario.get("block_size", 16)
        self.caching: bool = scenario.get("enable_caching", True)
        groups = scenario.get("groups", [{"type": "full"}])
        self.num_groups = len(groups)
        self.config = KVCacheConfig(
            scenario["num_blocks"],
            [KVCacheGroupSpec([f"layer{index}"], make_spec(group, self.block_size), group.get("eagle", False)) for index, group in enumerate(groups)],
        )
        self.hash_block_size: int = scenario.get("hash_block_size", self.config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.hasher = BlockHasher(self.hash_block_size, scenario.get("hash_algo", "sha256_cbor"))
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
            enable_caching=self.caching,
            use_eagle=scenario.get("use_eagle", False),
            watermark=scenario.get("watermark", 0.0),
            enable_kv_cache_events=scenario.get("events", True),
            strict=False,
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
        found = {"hit_tokens": hit.num_tokens, "hit_blocks": list(hit.blocks.get_block_ids())}
        num_new_tokens = op.get("new", request.num_tokens - hit.num_tokens)
        new_blocks = self.manager.allocate_slots(
            request,
            num_new_tokens,
            hit.num_tokens,
            hit.blocks,
            op.get("lookahead", 0),
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
        return {"copies": [], "retained": []}

    def op_reset(self, op: Json) -> Json:
        return {"ok": self.manager.reset_prefix_cache()}

    def op_evict(self, op: Json) -> Json:
        self.manager.evict_blocks(set(op["ids"]))
        return {}

    def op_cache(self, op: Json) -> Json:
        self.manager.cache_blocks(self.requests[op["id"]], op["n"])
        return {}

    def op_skip(self, op: Json) -> Json:
        self.manager.remove_skipped_blocks(op["id"], op["n"])
        return {}

    def op_common(self, op: Json) -> Json:
        return {"common": self.manager.get_num_common_prefix_blocks(op["id"])}


class SchedulerDriver(ManagerDriver):
    """The scheduler runs; the driver is the model."""

    def build(self) -> KVCacheManager:
        scenario = self.scenario
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=scenario.get("max_num_seqs", 16),
                max_num_batched_tokens=scenario.get("max_batched_tokens", 8192),
                max_model_len=scenario.get("max_model_len", 8192),
                long_prefill_token_threshold=scenario.get("long_prefill_threshold", 0),
                scheduler_reserve_full_isl=scenario.get("reserve_full_isl", True),
                watermark=scenario.get("watermark", 0.0),
                policy=scenario.get("policy", "fcfs"),
            ),
            self.config,
            enable_caching=self.caching,
            hash_block_size=self.hash_block_size,
            use_eagle=scenario.get("use_eagle", False),
            enable_kv_cache_events=scenario.get("events", True),
            strict=False,
        )
        self.next_token: int = scenario.get("first_output_token", 9001)
        self.open_schedules: list[SchedulerOutput] = []
        return self.scheduler.kv_cache_manager

    def op_add(self, op: Json) -> Json:
        request = self.make_request(op)
        self.scheduler.add_request(request)
        return {"n_hashes": len(request.block_hashes)}

    def op_abort(self, op: Json) -> Json:
        self.scheduler.finish_requests(op["id"], RequestStatus.FINISHED_ABORTED)
        return {}

    def op_schedule_only(self, op: Json) -> Json:
        output = self.scheduler.schedule()
        self.open_schedules.append(output)
        cached = output.scheduled_cached_reqs
        return {
            "scheduled": dict(output.num_scheduled_tokens),
            "new": {new.req_id: {"blocks": self._ids(new.block_ids), "computed": new.num_computed_tokens} for new in output.scheduled_new_reqs},
            "cached": {
                request_id: {"new_blocks": self._ids(ids) if ids else None, "computed": computed}
                for request_id, ids, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
            },
            "resumed": sorted(cached.resumed_req_ids),
            "preempted": sorted(output.preempted_req_ids),
            "finished": sorted(output.finished_req_ids),
            "copies": [list(copy) for copy in output.kv_cache_block_copies],
            "zero": output.new_block_ids_to_zero,
            "common": output.num_common_prefix_blocks,
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
        }

    def op_update_only(self, op: Json) -> Json:
        output = self.open_schedules.pop(0)
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            given = op.get("out", {}).get(request_id)
            if given is not None:
                sampled[request_id] = list(given)
            elif request.num_computed_tokens < request.num_tokens:
                sampled[request_id] = []
            else:
                sampled[request_id] = [self.next_token]
                self.next_token += 1
        forced = Cause(CauseKind.FORCED)
        ended = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput({request_id: [SampledToken(token, forced) for token in tokens] for request_id, tokens in sampled.items()}),
        )
        self._learn()
        return {"sampled": sampled, "finished": {request.request_id: request.get_finished_reason() for request in ended}}

    def op_sched(self, op: Json) -> Json:
        return {"schedule": self.op_schedule_only(op), "update": self.op_update_only(op)}

    def op_reset(self, op: Json) -> Json:
        return {"ok": self.scheduler.reset_prefix_cache(op.get("running", False))}


DRIVERS: dict[str, type[PoolDriver] | type[ManagerDriver]] = {
    "manager": ManagerDriver,
    "scheduler": SchedulerDriver,
    "pool": PoolDriver,
}


def run(scenario: Json) -> Json:
    """One scenario, from the fresh engine through all its operations."""
    name = scenario.get("name", "?")
    try:
        driver = DRIVERS[scenario.get("mode", "manager")](scenario)
    except Exception as error:
        empty: Json = {"free": [], "ref": {}, "map": {}}
        return {"name": name, "steps": [{"op": "BUILD", "error": f"{type(error).__name__}: {error}", "state": empty}]}
    steps: list[Json] = [{"op": "init", "state": driver.state()}]
    for op in scenario["ops"]:
        try:
            result = getattr(driver, f"op_{op['op']}")(op)
        except Exception as error:  # reported in the result: the run goes on
            result = {"error": f"{type(error).__name__}: {error}"}
        steps.append({"op": op, "result": result, "state": driver.state()})
    return {"name": name, "steps": steps}


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump([run(scenario) for scenario in (scenarios if isinstance(scenarios, list) else [scenarios])], sys.stdout)


if __name__ == "__main__":
    main()
