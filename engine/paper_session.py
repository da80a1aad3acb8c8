"""A session of the paper's engine: requests and settings in, a trace out.

The same outside as `engine.session.Session`. The provider's prefixes are computed first, in step 0; then the loop goes round as vLLM's first release had
it: arrivals, schedule, execute, update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.errors import EngineError, InvalidInput
from engine.paper.config import PaperConfig as PaperConfig
from engine.paper.config import PaperRequestSpec as PaperRequestSpec
from engine.paper.scheduler import PaperScheduler
from engine.paper.step import IterationRunner
from engine.paper_capture import PaperCapture
from engine.runner import PaperRunnerChoice
from engine.session_base import NO_MODEL, InterpretedLayers, SessionBase, token_ids_of
from engine.session_config import ActionSpec
from engine.trace.events import BlocksFreed, BlocksTouched, Cause, CauseKind, Event, RequestAdded, TraceStarted
from engine.trace.frame import Trace
from engine.trace.recorder import Recorder


class PaperSession(SessionBase[PaperConfig, PaperRequestSpec]):
    """One run of the paper's engine, made, driven and refused as `SessionBase` says.

    `requests`: prefixes (`is_prefix`) and requests, in any order. `actions`: abort and arrange_free_queue, which names the blocks that come first. Raises
    InvalidInput also for an unknown prefix, and for forced outputs that are missing without a model.
    """

    def _prepare(self, model_name: str, backend: str | None, interpreted_layers: InterpretedLayers) -> None:
        config = self.config
        self._runner_choice = PaperRunnerChoice(config, model_name, backend, interpreted_layers)
        self._runner: IterationRunner | None = None
        self.trace = Trace(self._header(self._runner_choice), [])
        self._scheduler = PaperScheduler(config, self._emit)
        self._capture = PaperCapture(self._scheduler, config, self._pins)
        self._recorder = Recorder(self.trace, self._capture, max_frames=config.max_frames)

    # ------------------------------------------------------------------ the engine loop

    def _operations(self) -> Iterator[None]:
        """The run as a generator that pauses before each execution of the model."""
        recorder, scheduler = self._recorder, self._scheduler
        self._emit(TraceStarted(cause=Cause(CauseKind.SCENARIO), num_blocks=self.config.num_blocks, block_size=self.config.block_size))
        requests: tuple[PaperRequestSpec, ...] = self._inputs["requests"]
        for spec in requests:
            if spec.is_prefix:
                self._arrive(spec)
        while scheduler.has_unfinished_requests():
            yield from self._iterate(may_wait=False)
        pending = sorted((r for r in requests if not r.is_prefix), key=lambda r: r.arrival_step)
        actions = sorted(self._inputs["actions"], key=lambda a: a.at_step)
        while pending or actions or scheduler.has_unfinished_requests():
            if not scheduler.has_unfinished_requests():  # nothing runs: go on to what comes next
                recorder.step = max(recorder.step, min([*(r.arrival_step for r in pending), *(a.at_step for a in actions)]) - 1)
                scheduler.current_step = recorder.step
            while pending and pending[0].arrival_step <= recorder.step + 1:
                self._arrive(pending.pop(0))
            while actions and actions[0].at_step <= recorder.step + 1:
                self._act(actions.pop(0))
            if scheduler.has_unfinished_requests():
                recorder.begin_step()
                yield from self._iterate(may_wait=bool(pending or actions))

    def _iterate(self, *, may_wait: bool) -> Iterator[None]:
        """One iteration. Raises EngineError when nothing can ever go on, unless something may still happen from outside (`may_wait`)."""
        recorder, scheduler = self._recorder, self._scheduler
        before = self._places()
        recorder.begin_op("schedule")
        plan = scheduler.schedule()
        if not plan.sequences and self._places() == before and not may_wait:
            raise EngineError(self._stuck())
        yield
        recorder.begin_op("execute_model")
        if self._runner is None:
            self._runner = self._runner_choice.make(self._emit)
            self._capture.worker = self._runner
        outputs = self._runner.execute(plan)
        recorder.begin_op("update_from_output")
        scheduler.update_from_output(outputs)

    def _places(self) -> list[list[str]]:
        """Where each request stands: what changes whenever anything is admitted, preempted or brought back."""
        scheduler = self._scheduler
        return [[group.request_id for group in groups] for groups in (scheduler.waiting, scheduler.running, scheduler.swapped)]

    def _stuck(self) -> str:
        scheduler = self._scheduler
        group = next(iter([*scheduler.swapped, *scheduler.waiting, *scheduler.running]))
        num_tokens = max(sequence.num_tokens for sequence in group.living)
        what = f"its {len(group.living)} sequences of up to {num_tokens} tokens" if len(group.living) > 1 else f"its {num_tokens} tokens"
        if not group.is_forked:
            what = f"its {num_tokens} tokens and the {group.spec.n} samples that follow"
        return (
            f"no request can go on: {group.request_id} needs more room for {what} than the {scheduler.block_manager.gpu_allocator.num_free_blocks} free "
            f"blocks of {self.config.block_size} or the {self.config.max_num_batched_tokens} tokens of an iteration give; raise num_blocks or "
            "max_num_batched_tokens"
        )

    # ------------------------------------------------------------------ what the scenario does

    def _arrive(self, spec: PaperRequestSpec) -> None:
        self._recorder.begin_op(f"{'keep_prefix' if spec.is_prefix else 'add_request'} {spec.request_id}")
        self._scheduler.add_request(spec)

    def _act(self, action: ActionSpec) -> None:
        if action.kind == "arrange_free_queue":
            self._recorder.begin_op("arrange_free_queue")
            self._arrange(action.block_ids)
        elif action.request_id is not None:
            self._recorder.begin_op(f"abort {action.request_id}")
            self._scheduler.abort_request(action.request_id)

    def _arrange(self, order: tuple[int, ...]) -> None:
        """These free blocks come first: they are held for a moment and let go again. Raises EngineError unless each is free and named once. vLLM: none; here:
        for drawings whose numbers follow another order."""
        allocator = self._scheduler.block_manager.gpu_allocator
        free = allocator.free_block_ids
        if len(set(order)) != len(order) or not set(order) <= set(free):
            raise EngineError(f"arrange_free_queue names the blocks {list(order)}, but those in the free queue are {free}; name free blocks, each once")
        cause = Cause(CauseKind.PREPARED)
        blocks = [allocator.blocks[block_id] for block_id in order]
        for block in blocks:
            allocator.free_block_queue.remove(block)
            block.ref_cnt += 1
        self._pins.update(dict.fromkeys(order, ("scenario",)))
        self._emit(BlocksTouched(cause=cause, block_ids=list(order), left_free_queue=list(order)))
        self._pins.clear()
        prepended, still_referenced = allocator.free(reversed(blocks))
        self._emit(BlocksFreed(cause=cause, block_ids=list(order)[::-1], prepended=prepended, appended=[], still_referenced=still_referenced))

    # ------------------------------------------------------------------ plumbing

    def _shown_token_ids(self, event: Event) -> Iterable[int]:
        if isinstance(event, RequestAdded):
            return [token_id for sequence in self._scheduler.sequences.values() for token_id in sequence.token_ids]
        return token_ids_of(event)

    def _check(self, requests: tuple[PaperRequestSpec, ...], actions: tuple[ActionSpec, ...], model_name: str) -> None:
        if not any(not spec.is_prefix for spec in requests):
            raise InvalidInput("there are no requests: give the scenario at least one")
        for index, spec in enumerate(requests):
            name = spec.request_id
            self._scheduler.check_request(spec, requests[:index] + requests[index + 1 :])
            self._runner_choice.check_token_ids(name, spec.prompt_token_ids)
            if model_name == NO_MODEL and not spec.is_prefix:
                _check_forced(spec)
        for action in actions:
            if action.kind not in ("abort", "arrange_free_queue"):
                raise InvalidInput(f"{action.kind} is about a prefix cache, which the paper's engine has not: leave it out")


def _check_forced(spec: PaperRequestSpec) -> None:
    """Without a model everything must be dictated."""
    name = spec.request_id
    if spec.beam_width is not None:
        if len(spec.forced_beams) < spec.max_tokens:
            raise InvalidInput(f"request {name} has beams that nothing decides: without a model, force the survivors of all {spec.max_tokens} iterations")
        return
    for index in range(spec.n):
        forced = spec.forced_token_ids[index] if index < len(spec.forced_token_ids) else ()
        if len(forced) < spec.max_tokens:
            raise InvalidInput(f"request {name} has outputs that nothing decides: without a model, force all {spec.max_tokens} of each sample")
