"""The step's plan in the form that the worker is sent."""

from __future__ import annotations

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine.core.step_plan import StepPlan


def make_scheduler_output(
    plan: StepPlan,
    manager: KVCacheManager,
    num_common_prefix_blocks: list[int],
    copies: list[tuple[int, int]],
    finished_req_ids: set[str],
    preempted_req_ids: set[str],
) -> SchedulerOutput:
    """New and resumed requests get their full tables, running ones what was appended (R8.3). Drains the ids of blocks to be zeroed, which are told only where
    some group keeps recurrent states. vLLM: the end of Scheduler.schedule."""
    cached = [*plan.running, *plan.resumed]
    resumed_ids = {request.request_id for request in plan.resumed}
    to_zero = manager.take_new_block_ids()
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                block_ids=manager.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                sampling_params=request.sampling_params,
            )
            for request in plan.new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[request.request_id for request in cached],
            resumed_req_ids=resumed_ids,
            all_token_ids={request.request_id: list(request.all_token_ids) for request in plan.resumed},
            new_block_ids=[
                _full_table(manager, request.request_id) if request.request_id in resumed_ids else plan.new_block_ids(request) for request in cached
            ],
            num_computed_tokens=[request.num_computed_tokens for request in cached],
            num_output_tokens=[request.num_output_tokens + request.num_output_placeholders for request in cached],
        ),
        num_scheduled_tokens=plan.num_scheduled_tokens,
        total_num_scheduled_tokens=sum(plan.num_scheduled_tokens.values()),
        num_common_prefix_blocks=num_common_prefix_blocks,
        finished_req_ids=finished_req_ids,
        preempted_req_ids=preempted_req_ids,
        kv_cache_block_copies=copies,
        new_block_ids_to_zero=to_zero if to_zero and manager.kv_cache_config.has_mamba_layers else None,
    )


def _full_table(manager: KVCacheManager, request_id: str) -> tuple[list[int], ...] | None:
    """Ids per group, None when no group has any: a decoder's table of encoder states may be empty."""
    blocks = manager.get_blocks(request_id)
    return None if blocks.is_empty() else blocks.get_block_ids()
