"""Conformance operations on the scheduler."""

from __future__ import annotations

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import ModelRunnerOutput, SampledToken, SchedulerOutput
from engine.core.request import RequestStatus
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.trace.events import Cause, CauseKind
from tests.conformance.manager_driver import ManagerDriver
from tests.conformance.names import Json


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
                async_scheduling=scenario.get("async", False),
            ),
            self.config,
            enable_caching=self.caching,
            hash_block_size=self.hash_block_size,
            scheduler_block_size=self.scheduler_block_size,
            block_size=self.block_size,
            # The runs were recorded on a CPU, where the platform clears the setting of asynchronous scheduling that this number is made from.
            max_in_flight_tokens=scenario.get("max_batched_tokens", 8192),
            retention_interval=scenario.get("retention_interval"),
            enable_kv_cache_events=scenario.get("events", True),
            compat=self.compat,
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
            elif request.is_prefill_chunk and request.num_computed_tokens < request.num_tokens:
                sampled[request_id] = []
            else:
                sampled[request_id] = [self.next_token]
                self.next_token += 1
        forced = Cause(CauseKind.FORCED)
        num_tokens = {request_id: self.requests[request_id].num_tokens for request_id in sampled}
        ended = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput({request_id: [SampledToken(token, forced) for token in tokens] for request_id, tokens in sampled.items()}),
        )
        self._learn()
        for request in ended:  # what came after the last token is not part of it
            sampled[request.request_id] = sampled[request.request_id][: request.num_tokens - num_tokens[request.request_id]]
        return {"sampled": sampled, "finished": {request.request_id: request.get_finished_reason() for request in ended}}

    def op_sched(self, op: Json) -> Json:
        return {"schedule": self.op_schedule_only(op), "update": self.op_update_only(op)}

    def op_reset(self, op: Json) -> Json:
        return {"ok": self.scheduler.reset_prefix_cache(op.get("running", False))}
