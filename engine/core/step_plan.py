"""One step in the making: what schedule() has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.kv_cache_manager import KVCacheBlocks
from engine.core.request import Request
from engine.trace.events import Cause, CauseKind


@dataclass
class StepPlan:
    """`token_budget` is what is left of it. `new`, `resumed`, `running`: scheduled requests by where they came from, in order of scheduling."""

    token_budget: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    _new_blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)

    def take(self, request: Request, num_new_tokens: int, new_blocks: KVCacheBlocks) -> None:
        """Schedule `num_new_tokens` of `request`, for which `new_blocks` were allocated."""
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self._new_blocks[request.request_id] = new_blocks
        self.token_budget -= num_new_tokens

    def unschedule(self, request: Request) -> bool:
        """Take a running request out again and give its budget back; False if it was not scheduled in this step (R7.5)."""
        if request.request_id not in self.num_scheduled_tokens:
            return False
        self.running.remove(request)
        self.token_budget += self.num_scheduled_tokens.pop(request.request_id)
        del self._new_blocks[request.request_id]
        return True

    def new_block_ids(self, request: Request) -> tuple[list[int], ...] | None:
        """Ids allocated for `request` in this step, None when there are none."""
        blocks = self._new_blocks[request.request_id]
        return None if blocks.is_empty() else blocks.get_block_ids()


def why_so_many(request: Request, num_wanted: int, num_capped: int, num_new_tokens: int, token_budget: int) -> Cause:
    """Why the step computes `num_new_tokens` of the `num_wanted` tokens that are not computed; `num_capped`: as many as the threshold allows (R7.2, R7.3)."""
    if num_new_tokens < num_capped:
        return Cause(CauseKind.CHUNKED_BY_BUDGET, {"num_wanted": num_wanted, "num_new_tokens": num_new_tokens, "token_budget": token_budget})
    if num_capped < num_wanted:
        return Cause(CauseKind.CHUNKED_BY_THRESHOLD, {"num_wanted": num_wanted, "num_new_tokens": num_new_tokens, "threshold": num_capped})
    decodes = num_new_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
    return Cause(CauseKind.DECODE if decodes else CauseKind.PREFILL, {"num_new_tokens": num_new_tokens})


def why_admitted(request: Request, by_priority: bool, num_required: int, num_free: int) -> Cause:
    """Why this one of the waiting requests, with what it took from the queue and what was there."""
    facts = {"num_required": num_required, "num_free": num_free}
    return Cause(CauseKind.PRIORITY_HEAD, {**facts, "priority": request.priority}) if by_priority else Cause(CauseKind.FCFS_HEAD, dict(facts))
