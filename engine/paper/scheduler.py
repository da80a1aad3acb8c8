"""Iteration-level scheduling of sequence groups (sections 4.3 and 4.5), as in vLLM's first release.

First come, first served: running groups first, in order of arrival; who arrived last gives way when blocks are missing. Swapped groups come back before anybody
new is admitted. A group is scheduled, preempted and brought back as a whole.
"""

from __future__ import annotations

from bisect import insort

from engine.errors import InvalidInput
from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.iteration import Iteration, make_plan, num_tokens_of
from engine.paper.outputs import OutputProcessor
from engine.paper.preemption import preempt
from engine.paper.request_check import check_request
from engine.paper.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.paper.step import IterationPlan, SequenceOutput
from engine.trace.events import (
    AllocationRefused,
    Cause,
    CauseKind,
    Emit,
    Event,
    PrefixKept,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestScheduled,
    StepScheduled,
    StepStarted,
)


class PaperScheduler:
    """Groups that wait, run or are swapped, over one BlockSpaceManager.

    `waiting`, `running`, `swapped`: each in order of arrival, the provider's prefixes before everybody else. `sequences`: all that ever were, by id, in
    order of birth; `groups`: by request id. `current_step`: iterations planned so far; whoever lets idle ones pass may move it on. `emit` hears of every
    change when it is complete. vLLM's first release: Scheduler; here: prefixes, exact counts of what a step needs, and a watermark that only matters beside
    running groups.
    """

    def __init__(self, config: PaperConfig, emit: Emit | None = None) -> None:
        self.config = config
        self._emit: Emit = emit if emit is not None else _nobody_listens
        self.block_manager = BlockSpaceManager(
            config.block_size, config.num_blocks, config.num_cpu_blocks, watermark=config.watermark, free_queue_order=config.free_queue_order, emit=emit
        )  # fmt: skip
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.sequences: dict[str, Sequence] = {}
        self.groups: dict[str, SequenceGroup] = {}
        self.current_step = 0
        self._finished: list[str] = []
        self._in_flight: list[SequenceGroup] = []
        self._processor = OutputProcessor(config, self.block_manager, self._finish, self._add_sequence, self._emit)

    # ------------------------------------------------------------------ requests come and go
    def check_request(self, spec: PaperRequestSpec, others: tuple[PaperRequestSpec, ...] = ()) -> None:
        """Raises InvalidInput when `spec` can never be served (see request_check). `others`: requests that are still to come, besides those that are known
        here: a prefix may be among them. Changes nothing."""
        check_request(spec, self.config, [*(group.spec for group in self.groups.values()), *others])

    def add_request(self, spec: PaperRequestSpec) -> None:
        """Queue a new group. Raises InvalidInput, changing nothing, for what check_request refuses, and for a prefix that would leave others too few blocks."""
        self.check_request(spec)
        if spec.is_prefix:
            specs = [group.spec for group in self.groups.values()]
            for group in self.groups.values():
                if not group.is_finished and not group.spec.is_prefix:
                    check_request(group.spec, self.config, [*specs, spec])
        prefix = self.groups[spec.prefix_id].sequences[0] if spec.prefix_id is not None else None
        group = SequenceGroup(spec, len(self.groups), prefix)
        self.groups[spec.request_id] = group
        self._add_sequence(group.sequences[0])
        self._insert(self.waiting, group)
        cause = Cause(CauseKind.SCENARIO, {"what": "arrival"})
        num_prompt_tokens = len(spec.prompt_token_ids)
        self._emit(RequestAdded(cause=cause, request_id=group.event_id, num_prompt_tokens=num_prompt_tokens, num_block_hashes=0))

    def abort_request(self, request_id: str) -> None:
        """End all living sequences of a group from outside; nothing happens to one that has ended. Raises InvalidInput for an unknown id and for a prefix,
        which its provider keeps."""
        group = self.groups.get(request_id)
        if group is None:
            raise InvalidInput(f"there is no request {request_id!r} to abort: name one that has arrived")
        if group.spec.is_prefix:
            raise InvalidInput(f"request {request_id!r} is a prefix that the provider keeps, so it cannot be aborted: abort a request that begins with it")
        for sequence in list(group.living):
            self._finish(sequence, SequenceStatus.FINISHED_ABORTED, Cause(CauseKind.SCENARIO, {"what": "abort"}))

    def has_unfinished_requests(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running or self.swapped)

    def _add_sequence(self, sequence: Sequence) -> None:
        self.sequences[sequence.sequence_id] = sequence

    def _insert(self, groups: list[SequenceGroup], group: SequenceGroup) -> None:
        insort(groups, group, key=lambda g: (not g.spec.is_prefix, g.arrival))

    # ------------------------------------------------------------------ one iteration
    def schedule(self) -> IterationPlan:
        """Plan one iteration: running groups, then swapped ones unless somebody was preempted, then waiting ones unless somebody is swapped; then
        num_computed_tokens moves on, before anything has run."""
        iteration = Iteration(self.config.max_num_batched_tokens)
        counts = {"num_running": len(self.running), "num_waiting": len(self.waiting)}
        self._emit(StepStarted(cause=Cause(CauseKind.NEXT_STEP, {**counts}), token_budget=iteration.token_budget))
        self.current_step += 1
        self._schedule_running(iteration)
        if not iteration.preempted:
            self._schedule_swapped(iteration)
            self._schedule_waiting(iteration)
        plan = make_plan(iteration, self.block_manager, self._finished)
        self._finished = []
        for sequence_id, num_tokens in iteration.num_scheduled_tokens.items():
            self.sequences[sequence_id].num_computed_tokens += num_tokens
        self._in_flight = [group for group in iteration.groups if not any(sequence.num_uncomputed_tokens for sequence in group.living)]
        counts = {"num_running": len(self.running), "num_waiting": len(self.waiting)}
        num_scheduled, budget = dict(iteration.num_scheduled_tokens), iteration.token_budget
        self._emit(StepScheduled(cause=Cause(CauseKind.NEXT_STEP, {**counts}), num_scheduled_tokens=num_scheduled, token_budget_left=budget))
        return plan

    def _schedule_running(self, iteration: Iteration) -> None:
        index = 0
        while index < len(self.running):
            group = self.running[index]
            if not sum(num_tokens_of(group, iteration.token_budget)):
                break  # nobody overtakes: those behind wait for a fresh budget too
            while not self.block_manager.can_append_slots(group):
                manager = self.block_manager
                facts = {"num_required": manager.num_blocks_to_append(group.living), "num_free": manager.gpu_allocator.num_free_blocks}
                cause = Cause(CauseKind.ONE_BLOCK_PER_SEQUENCE, {"num_sequences": len(group.living), **facts})
                self._refuse(group, len(group.living), cause)
                victim = self.running[-1]
                self._preempt(victim, group, iteration)
                if victim is group:
                    return
            self._take(group, iteration)
            index += 1

    def _preempt(self, victim: SequenceGroup, for_group: SequenceGroup, iteration: Iteration) -> None:
        def put_away(by_swap: bool) -> None:
            self.running.remove(victim)
            self._insert(self.swapped if by_swap else self.waiting, victim)

        iteration.preempted = True
        iteration.swap_out += preempt(victim, for_group, self.block_manager, self.config.preemption_mode, put_away, self._emit)

    def _schedule_swapped(self, iteration: Iteration) -> None:
        while self.swapped:
            group = self.swapped[0]
            if not self._has_seats_for(group) or not sum(num_tokens_of(group, iteration.token_budget)):
                return
            manager = self.block_manager
            num_free, num_blocks = manager.gpu_allocator.num_free_blocks, manager.num_blocks_to_swap_in(group)
            if not manager.can_swap_in(group, num_reserved_blocks=self._num_reserved_blocks()):
                self._refuse(group, len(group.living), self._insufficient(num_blocks, num_free))
                return
            self.swapped.remove(group)
            self._insert(self.running, group)
            cause = Cause(CauseKind.SWAPPED_BACK, {"num_blocks": num_blocks, "num_free": num_free})
            iteration.swap_in += manager.swap_in(group, cause)
            num_computed = group.living[0].num_computed_tokens
            self._emit(RequestAdmitted(cause=cause, request_id=group.event_id, num_computed_tokens=num_computed, resumed=True))
            self._take(group, iteration)

    def _schedule_waiting(self, iteration: Iteration) -> None:
        while self.waiting:
            group = self.waiting[0]
            num_tokens = sum(sequence.num_tokens for sequence in group.living)
            if self.swapped:
                self._refuse(group, num_tokens, Cause(CauseKind.PREEMPTED_FIRST, {"num_swapped": len(self.swapped)}))
                return
            if not self._has_seats_for(group) or (group.prefix is not None and group.prefix.status is not SequenceStatus.PREFIX_KEPT):
                return
            if not self._admit(group, iteration) or group.spec.is_prefix:
                return  # a prefix is computed before anybody is admitted who may begin with it

    def _admit(self, group: SequenceGroup, iteration: Iteration) -> bool:
        """Give the head of the waiting queue its blocks and schedule it; False, changing nothing, when it has to wait."""
        manager, budget = self.block_manager, iteration.token_budget
        num_wanted = manager.num_tokens_to_compute(group)
        in_one_piece = num_wanted <= self.config.max_num_batched_tokens  # only a recomputation can be larger
        if budget < (num_wanted if in_one_piece else 1):
            facts = {"num_tokens": num_wanted, "token_budget": budget}
            self._refuse(group, num_wanted, Cause(CauseKind.PROMPT_TOO_LONG_FOR_STEP, {**facts}))
            return False
        num_required, num_free = manager.num_blocks_to_allocate(group), manager.gpu_allocator.num_free_blocks
        if not manager.can_allocate(group, num_reserved_blocks=self._num_reserved_blocks()):
            self._refuse(group, num_wanted, self._insufficient(num_required, num_free))
            return False
        resumed = group.living[0].status is SequenceStatus.PREEMPTED
        iteration.copies += manager.allocate(group)
        self.waiting.remove(group)
        self._insert(self.running, group)
        for sequence in group.living:
            sequence.status = SequenceStatus.RUNNING
        cause = Cause(CauseKind.FCFS_HEAD, {"num_required": num_required, "num_free": num_free})
        num_computed = group.living[0].num_computed_tokens
        self._emit(RequestAdmitted(cause=cause, request_id=group.event_id, num_computed_tokens=num_computed, resumed=resumed))
        self._take(group, iteration)
        return True

    def _take(self, group: SequenceGroup, iteration: Iteration) -> None:
        """Slots for the group's next tokens, and its tokens into the iteration."""
        counts = num_tokens_of(group, iteration.token_budget)
        for sequence, num_tokens in zip(group.living, counts, strict=True):
            copy = self.block_manager.append_slot(sequence)
            if copy is not None:
                iteration.copies.append(copy)
            if num_tokens:
                self._emit(self._scheduled(sequence, num_tokens, iteration.token_budget))
                iteration.take(sequence, num_tokens)

    def _scheduled(self, sequence: Sequence, num_tokens: int, token_budget: int) -> Event:
        num_wanted = sequence.num_uncomputed_tokens
        if num_tokens < num_wanted:
            cause = Cause(CauseKind.CHUNKED_BY_BUDGET, {"num_wanted": num_wanted, "num_new_tokens": num_tokens, "token_budget": token_budget})
        else:
            is_decode = num_wanted == 1 and sequence.num_output_tokens > 0
            cause = Cause(CauseKind.DECODE if is_decode else CauseKind.PREFILL, {"num_new_tokens": num_tokens})
        num_computed = sequence.num_computed_tokens
        return RequestScheduled(cause=cause, request_id=sequence.sequence_id, num_scheduled_tokens=num_tokens, num_computed_tokens=num_computed)

    def _has_seats_for(self, group: SequenceGroup) -> bool:
        taken = sum(running.max_num_running_seqs for running in self.running)
        return taken + group.max_num_running_seqs <= self.config.max_num_seqs

    def _num_reserved_blocks(self) -> int:
        """The watermark, which is there to spare the running groups preemptions; without them nothing is kept back."""
        return self.block_manager.watermark_blocks if self.running else 0

    def _insufficient(self, num_required: int, num_free: int) -> Cause:
        facts = {"num_required": num_required, "num_evictable_hits": 0, "num_watermark": self._num_reserved_blocks(), "num_free": num_free, "num_reserved": 0}
        return Cause(CauseKind.INSUFFICIENT_BLOCKS, {**facts})

    def _refuse(self, group: SequenceGroup, num_new_tokens: int, cause: Cause) -> None:
        self._emit(AllocationRefused(cause=cause, request_id=group.event_id, num_new_tokens=num_new_tokens, at_gate=False))

    # ------------------------------------------------------------------ the worker has answered
    def update_from_output(self, outputs: dict[str, SequenceOutput]) -> None:
        """Apply the answers of the iteration that was planned last, group by group: tokens, forks, beams, ends; blocks are freed at once. Raises EngineError
        when an answer is missing."""
        groups, self._in_flight = self._in_flight, []
        for group in groups:
            if group.is_finished:
                continue  # aborted while the model ran
            if group.spec.is_prefix:
                self._keep_prefix(group)
            elif group.hypotheses is not None:
                self._processor.choose_beams(group, outputs)
            else:
                self._processor.sample(group, outputs)

    def _keep_prefix(self, group: SequenceGroup) -> None:
        sequence = group.living.pop()
        sequence.status = SequenceStatus.PREFIX_KEPT
        self.running.remove(group)
        block_ids = list(self.block_manager.block_ids(sequence.sequence_id))
        cause = Cause(CauseKind.PREFIX_KEPT, {"num_tokens": sequence.num_tokens})
        self._emit(PrefixKept(cause=cause, request_id=sequence.sequence_id, block_ids=block_ids))

    def _finish(self, sequence: Sequence, status: SequenceStatus, cause: Cause) -> None:
        """End one sequence and free its blocks. Its group leaves its list with its last sequence."""
        group, manager = sequence.group, self.block_manager
        group.living.remove(sequence)
        if group.is_finished:
            for groups in (self.waiting, self.running, self.swapped):
                if group in groups:
                    groups.remove(group)
        if sequence.status is SequenceStatus.SWAPPED:
            manager.free(sequence, cause)
        sequence.status = status
        self._finished.append(sequence.sequence_id)
        self._emit(RequestFinished(cause=cause, request_id=sequence.sequence_id, reason=status.value))
        dropped = status is SequenceStatus.FINISHED_DROPPED
        manager.free(sequence, cause if dropped else Cause(CauseKind.REQUEST_FINISHED, {"reason": status.value}))


def _nobody_listens(event: Event) -> None:
    """What happens to events that nobody wants."""
