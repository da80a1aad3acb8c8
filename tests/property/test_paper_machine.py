"""Random groups, beams, prefixes, aborts in tiny pools with and without swap space: whatever is shared, copied, swapped or computed again, every sequence reads
its own tokens and says what it would say alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import InvalidInput
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.request_check import num_blocks_alone
from engine.paper.scheduler import PaperScheduler
from engine.paper.sequence import SequenceGroup, SequenceStatus
from engine.trace.events import BlocksSwappedIn, BlocksSwappedOut, CopyQueued, Event, RequestPreempted
from tests.property.paper_model import STOP, SlotWorker, check_books, expected_beams, expected_samples

PROMPTS = st.lists(st.integers(4, 6), min_size=1, max_size=9)


class PaperMachine(RuleBasedStateMachine):
    """Sections 4.3 to 4.5 over a worker that knows what lies in every slot."""

    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 4),
        num_cpu_blocks=st.sampled_from([0, 0, 3, 6, 20]),
        preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
        max_num_seqs=st.integers(1, 9),
        max_num_batched_tokens=st.integers(4, 24),
        max_model_len=st.sampled_from([None, None, 12]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def build(self, **settings_: object) -> None:
        self.config = PaperConfig(**settings_)  # type: ignore[arg-type]
        self.scheduler = PaperScheduler(self.config, self.record)
        self.worker = SlotWorker(self.config.block_size)
        self.prefixes: list[PaperRequestSpec] = []
        self.aborted: set[str] = set()
        self.first_admissions: list[int] = []
        self.arrived = 0

    def record(self, event: Event) -> None:
        check_books(self.scheduler)
        manager = self.scheduler.block_manager
        if isinstance(event, CopyQueued):
            assert event.request_id is not None
            assert manager.block_ids(event.request_id)[event.logical_index] == event.destination_block_id
            assert manager.gpu_allocator.blocks[event.destination_block_id].ref_cnt == 1
            assert manager.gpu_allocator.blocks[event.source_block_id].ref_cnt >= 1
        elif isinstance(event, BlocksSwappedOut | BlocksSwappedIn):
            assert len(event.gpu_block_ids) == len(event.cpu_block_ids) == len(set(event.gpu_block_ids)) == len(set(event.cpu_block_ids))
            assert {sequence.status for sequence in self.group(event).living} == (
                {SequenceStatus.SWAPPED} if isinstance(event, BlocksSwappedOut) else {SequenceStatus.RUNNING}
            )
        elif isinstance(event, RequestPreempted):
            group = self.group(event)
            assert {sequence.status for sequence in group.living} == {SequenceStatus.PREEMPTED}  # together
            assert all(other.arrival < group.arrival for other in self.scheduler.running)  # the last one gives way

    def group(self, event: Event) -> SequenceGroup:
        assert event.request_id is not None
        return self.scheduler.groups[event.request_id]

    # ------------------------------------------------------------------ what happens
    def arrive(self, spec: PaperRequestSpec) -> None:
        if not self.has_room_in_the_worst_case(spec):
            return
        try:
            self.scheduler.add_request(spec)
        except InvalidInput:
            assert spec.request_id not in self.scheduler.groups
            return
        self.arrived += 1
        if spec.is_prefix:
            self.prefixes.append(spec)

    def has_room_in_the_worst_case(self, spec: PaperRequestSpec) -> bool:
        """Beams that may share too little to get to their end are somebody else's test."""
        size = self.config.block_size
        prefixes = [*self.prefixes, spec] if spec.is_prefix else self.prefixes
        room = self.config.num_blocks - sum(-(-len(prefix.prompt_token_ids) // size) for prefix in prefixes)
        lengths = {prefix.request_id: len(prefix.prompt_token_ids) for prefix in self.prefixes}
        going = [group.spec for group in self.scheduler.groups.values() if not group.is_finished]
        beams = [other for other in [*going, spec] if other.beam_width is not None]
        return all(num_blocks_alone(other, self.config, lengths.get(other.prefix_id or "", 0)) <= room for other in beams)

    def own_prompt(self, data: st.DataObject, prompt: list[int]) -> tuple[tuple[int, ...], str | None]:
        prefix = data.draw(st.sampled_from([None, *self.prefixes]))
        return ((*prefix.prompt_token_ids, *prompt), prefix.request_id) if prefix is not None else (tuple(prompt), None)

    @precondition(lambda self: self.arrived < 8)
    @rule(data=st.data(), prompt=PROMPTS, n=st.integers(1, 4), max_tokens=st.integers(1, 7), temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 3),
          stop=st.booleans(), forced=st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=2))  # fmt: skip
    def samples_arrive(
        self, data: st.DataObject, prompt: list[int], n: int, max_tokens: int, temperature: float, seed: int, stop: bool, forced: list[list[int]]
    ) -> None:  # fmt: skip
        tokens, prefix_id = self.own_prompt(data, prompt)
        dictated = tuple(tuple(outputs) for outputs in forced[:n])
        stops = (STOP,) if stop else ()
        self.arrive(
            PaperRequestSpec(f"r{self.arrived}_", tokens, max_tokens=max_tokens, n=n, temperature=temperature, seed=seed, stop_token_ids=stops,
                             forced_token_ids=dictated, prefix_id=prefix_id)
        )  # fmt: skip

    @precondition(lambda self: self.arrived < 8)
    @rule(
        data=st.data(),
        prompt=PROMPTS,
        width=st.integers(2, 4),
        max_tokens=st.integers(1, 6),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
        num_stops=st.integers(0, 3),
    )
    def beams_arrive(self, data: st.DataObject, prompt: list[int], width: int, max_tokens: int, penalty: float, num_stops: int) -> None:
        tokens, prefix_id = self.own_prompt(data, prompt)
        stops = tuple(range(num_stops))
        self.arrive(
            PaperRequestSpec(
                f"r{self.arrived}_", tokens, max_tokens=max_tokens, beam_width=width, length_penalty=penalty, stop_token_ids=stops, prefix_id=prefix_id
            )
        )

    @precondition(lambda self: len(self.prefixes) < 2)
    @rule(prompt=PROMPTS)
    def prefix_arrives(self, prompt: list[int]) -> None:
        self.arrive(PaperRequestSpec(f"r{self.arrived}_", tuple(prompt), is_prefix=True))

    @rule(times=st.integers(1, 4))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            self.step()

    def step(self) -> None:
        scheduler = self.scheduler
        manager, waiting = scheduler.block_manager, list(scheduler.waiting)
        new = {group.arrival for group in waiting if group.living[0].status is SequenceStatus.WAITING}
        plan = scheduler.schedule()
        assert sum(sequence.num_scheduled_tokens for sequence in plan.sequences) <= self.config.max_num_batched_tokens
        assert len(plan.sequences) <= self.config.max_num_seqs
        assert sum(len(group.living) for group in scheduler.running) <= self.config.max_num_seqs
        assert not (plan.swap_in and plan.swap_out)
        admitted = [group.arrival for group in scheduler.running if group.arrival in new and not group.spec.is_prefix]
        assert not (admitted and (plan.swap_out or scheduler.swapped))
        if admitted:
            assert max(admitted) < min(
                [a.arrival for a in scheduler.waiting if a.living[0].status is SequenceStatus.WAITING], default=999
            )  # first come, first served
        tables = {sequence_id: manager.block_ids(sequence_id) for sequence_id in manager.block_tables}
        assert all(sequence.block_ids == tables[sequence.sequence_id] for sequence in plan.sequences)
        outputs = self.worker.execute(plan)
        self.worker.check_all(scheduler)
        scheduler.update_from_output(outputs)
        assert plan.sequences or not scheduler.has_unfinished_requests(), "nobody gets on, so nobody ever will"

    @precondition(lambda self: self.scheduler.has_unfinished_requests())
    @rule(data=st.data(), really=st.sampled_from([False] * 5 + [True]))
    def abort(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        group = data.draw(st.sampled_from([*self.scheduler.waiting, *self.scheduler.running, *self.scheduler.swapped]))
        if group.spec.is_prefix:
            with pytest.raises(InvalidInput):
                self.scheduler.abort_request(group.request_id)
            return
        self.aborted.add(group.request_id)
        self.scheduler.abort_request(group.request_id)
        assert group.is_finished
        assert all(sequence.sequence_id not in self.scheduler.block_manager.block_tables for sequence in group.sequences)

    # ------------------------------------------------------------------ what must hold
    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            check_books(self.scheduler)
            self.worker.check_all(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(400):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests()
        self.nothing_is_left()
        for group in self.scheduler.groups.values():
            if group.request_id not in self.aborted and not group.spec.is_prefix:
                self.said_what_it_says_alone(group)

    def nothing_is_left(self) -> None:
        manager = self.scheduler.block_manager
        kept = {spec.request_id for spec in self.prefixes}
        assert set(manager.block_tables) == kept
        num_kept = sum(-(-len(spec.prompt_token_ids) // self.config.block_size) for spec in self.prefixes)
        assert manager.gpu_allocator.num_free_blocks == self.config.num_blocks - num_kept
        assert manager.cpu_allocator.num_free_blocks == self.config.num_cpu_blocks
        assert all(self.scheduler.sequences[sequence_id].status is SequenceStatus.PREFIX_KEPT for sequence_id in kept)

    def said_what_it_says_alone(self, group: SequenceGroup) -> None:
        spec = group.spec
        if spec.beam_width is None:
            assert [(s.output_token_ids, s.status.value) for s in group.results()] == expected_samples(spec, self.config.max_model_len)
            return
        assert group.hypotheses is not None
        found = [(sequence.output_token_ids, pytest.approx(score)) for score, sequence in group.hypotheses.entries]
        assert expected_beams(spec, self.config.max_model_len) == found
        assert group.results() == [sequence for _, sequence in group.hypotheses.entries[: spec.n]]
        ends = {sequence.status for sequence in group.sequences}
        assert ends <= {SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED, SequenceStatus.FINISHED_DROPPED}


TestPaperMachine = PaperMachine.TestCase
TestPaperMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[PaperRequestSpec], dict[str, int]]:
    """Requests that come at once, some with a common prefix, some as beams, and a pool in which the largest of them has just enough room alone."""
    block_size = draw(st.integers(1, 4))
    prefix = tuple(draw(st.lists(st.integers(4, 6), min_size=1, max_size=6)))
    specs = [PaperRequestSpec("P", prefix, is_prefix=True)]
    for number in range(draw(st.integers(2, 5))):
        begins = draw(st.booleans())
        prompt = (*(prefix if begins else ()), *draw(PROMPTS))
        width = draw(st.sampled_from([None, None, 2, 3, 4]))
        n = 1 if width is not None else draw(st.integers(1, 4))
        more = {"beam_width": width, "n": n, "max_tokens": draw(st.integers(2, 7)), "length_penalty": draw(st.sampled_from([0.0, 1.0]))}
        stops = draw(st.sampled_from([(), (STOP,), (0, 1)]))
        temperature = 0.0 if width is not None else draw(st.sampled_from([0.0, 1.0]))
        specs.append(
            PaperRequestSpec(f"r{number}_", prompt, stop_token_ids=stops, temperature=temperature, prefix_id="P" if begins else None, **more)  # type: ignore[arg-type]
        )
    roomy = PaperConfig(1, block_size)
    largest = max(num_blocks_alone(spec, roomy, len(prefix) if spec.prefix_id else 0) for spec in specs)
    num_blocks = largest + -(-len(prefix) // block_size) + draw(st.integers(0, 4))
    return specs, {"block_size": block_size, "num_blocks": num_blocks}


@settings(max_examples=150, deadline=None)
@given(crowd=crowds(), num_cpu_blocks=st.sampled_from([0, 4, 8, 40]), mode=st.sampled_from(["auto", "swap", "recompute"]), budget=st.sampled_from([15, 20, 60]))
def test_s4_5_a_crowd_in_a_tiny_pool_says_what_each_says_alone(
    crowd: tuple[list[PaperRequestSpec], dict[str, int]], num_cpu_blocks: int, mode: str, budget: int
) -> None:
    """Section 4.5: neither preemption nor swapping nor recomputing nor the company changes an output, and everything ends with all blocks free."""
    specs, sizes = crowd
    machine = PaperMachine()
    machine.build(num_cpu_blocks=num_cpu_blocks, preemption_mode=mode, max_num_seqs=12, max_num_batched_tokens=budget, **sizes)
    for spec in specs:
        machine.arrive(spec)
    assert machine.arrived == len(specs)
    machine.teardown()
