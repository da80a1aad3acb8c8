"""What an iteration's answers do to the sequences: tokens are appended, samples fork, beams are chosen, whoever is done ends."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import EngineError
from engine.paper.beam_search import Candidate, Selection, num_candidates_per_beam, rank_candidates, select, select_forced
from engine.paper.block_space_manager import BlockSpaceManager
from engine.paper.config import PaperConfig
from engine.paper.sequence import Sequence, SequenceGroup, SequenceStatus
from engine.paper.step import SequenceOutput
from engine.trace.events import BeamCandidate, BeamsChosen, Cause, CauseKind, Emit, TokenSampled

End = tuple[SequenceStatus, Cause]


class OutputProcessor:
    """Applies answers to groups. `finish` ends one sequence and frees its blocks, `add_sequence` makes a newborn one known. Mutates sequences and groups."""

    def __init__(
        self, config: PaperConfig, manager: BlockSpaceManager, finish: Callable[[Sequence, SequenceStatus, Cause], None],
        add_sequence: Callable[[Sequence], None], emit: Emit,
    ) -> None:  # fmt: skip
        self._config = config
        self._manager = manager
        self._finish = finish
        self._add_sequence = add_sequence
        self._emit = emit

    # ------------------------------------------------------------------ samples
    def sample(self, group: SequenceGroup, outputs: dict[str, SequenceOutput]) -> None:
        """One token for each living sample; when the prompt has just been computed, they are forked first. Raises EngineError when a token is missing."""
        tokens = [token for sequence in group.living for token in _answer(outputs, sequence).sampled]
        if not group.is_forked:
            group.is_forked = True
            first, num_samples = group.living[0], group.spec.n
            for _ in range(1, num_samples):
                self._fork(first, Cause(CauseKind.PARALLEL_SAMPLING, {"num_samples": num_samples}))
        if len(tokens) != len(group.living):
            raise EngineError(f"{group.request_id} has {len(group.living)} sequences, but the worker sampled {len(tokens)} tokens for it")
        for sequence, token in zip(list(group.living), tokens, strict=True):
            self._append(sequence, token.token_id, token.cause)
            end = self._end_of(sequence)
            if end is not None:
                self._finish(sequence, *end)

    def _fork(self, parent: Sequence, cause: Cause) -> Sequence:
        child = parent.group.fork(parent)
        parent.group.living.append(child)
        self._add_sequence(child)
        self._manager.fork(parent, child, cause)
        return child

    def _append(self, sequence: Sequence, token_id: int, cause: Cause) -> None:
        sequence.append_token(token_id, forced=cause.kind is CauseKind.FORCED)
        position = sequence.num_tokens - 1
        self._emit(TokenSampled(cause=cause, request_id=sequence.sequence_id, token_id=token_id, position=position, num_block_hashes=0))

    def _end_of(self, sequence: Sequence) -> End | None:
        """Why the sequence's last token is its end, None to go on."""
        spec, limit = sequence.group.spec, self._config.max_model_len
        if sequence.token_ids[-1] in spec.stop_token_ids:
            return SequenceStatus.FINISHED_STOPPED, Cause(CauseKind.STOP_TOKEN, {"token_id": sequence.token_ids[-1]})
        if sequence.num_output_tokens >= spec.max_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_TOKENS, {"max_tokens": spec.max_tokens})
        if limit is not None and sequence.num_tokens >= limit:
            return SequenceStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_MODEL_LEN, {"max_model_len": limit})
        return None

    # ------------------------------------------------------------------ beams
    def choose_beams(self, group: SequenceGroup, outputs: dict[str, SequenceOutput]) -> None:
        """One selection: the best candidates go on, forks and ends follow. A parent's sequence goes on as its first child that goes on (or else as its first
        finished one), further children are forks; a parent without children is dropped. Raises EngineError when nothing says who goes on."""
        beams = list(group.living)
        logprobs = [_answer(outputs, beam).logprobs for beam in beams]
        selection = self._select(group, beams, logprobs)
        heir: dict[int, int] = {}
        for i in [*selection.running, *selection.finished]:
            heir.setdefault(selection.candidates[i].parent, i)
        kept = sorted([*selection.running, *selection.finished])
        born = len(group.sequences)
        names: dict[int, str] = {}
        for i in kept:
            parent = selection.candidates[i].parent
            if heir[parent] == i:
                names[i] = beams[parent].sequence_id
            else:
                names[i], born = group.sequence_id(born), born + 1
        self._tell_selection(group, beams, selection, names)
        self._carry_on(group, beams, selection, kept, heir, [max(known, key=known.__getitem__) if known else None for known in logprobs])

    def _select(self, group: SequenceGroup, beams: list[Sequence], logprobs: list[dict[int, float]]) -> Selection:
        spec, limit, hypotheses = group.spec, self._config.max_model_len, group.hypotheses
        assert spec.beam_width is not None
        assert hypotheses is not None
        number = beams[0].num_output_tokens
        is_last = number + 1 >= spec.max_tokens or (limit is not None and beams[0].num_tokens + 1 >= limit)
        sums = [beam.cumulative_logprob for beam in beams]
        ranked = rank_candidates(sums, logprobs, num_candidates_per_beam(spec.beam_width, len(spec.stop_token_ids)))

        def ends(candidate: Candidate) -> bool:
            return candidate.token_id in spec.stop_token_ids

        if number < len(spec.forced_beams):
            return select_forced(spec.forced_beams[number], ranked, logprobs, sums, ends, is_last)
        if not ranked:
            raise EngineError(f"{group.request_id}: nothing says which beams go on after {number} tokens; run a model, or name the survivors of all selections")
        return select(ranked, hypotheses, ends, number + 1, is_last)

    def _tell_selection(self, group: SequenceGroup, beams: list[Sequence], selection: Selection, names: dict[int, str]) -> None:
        width = group.spec.beam_width or 0
        candidates = [
            BeamCandidate(
                parent_id=beams[c.parent].sequence_id,
                token_id=c.token_id,
                cumulative_logprob=c.cumulative_logprob,
                sequence_id=names.get(i),
                finished=i in selection.finished,
                forced=c.forced,
            )
            for i, c in enumerate(selection.candidates)
        ]
        cause = Cause(CauseKind.BEAM_SEARCH, {"beam_width": width, "num_candidates": len(candidates)})
        self._emit(BeamsChosen(cause=cause, request_id=group.request_id, beam_width=width, candidates=candidates))

    def _carry_on(
        self, group: SequenceGroup, beams: list[Sequence], selection: Selection, kept: list[int], heir: dict[int, int], said: list[int | None]
    ) -> None:  # fmt: skip
        """Forks, then drops, then tokens, then ends. `kept`: indices of the candidates that become sequences, best first; `heir`: of those, by parent, the one
        that goes on in the parent's sequence; `said`: the most probable token after each beam, None where no model ran."""
        assert group.hypotheses is not None
        width = group.hypotheses.beam_width
        becomes: dict[int, Sequence] = {}
        for rank, i in enumerate(kept):
            parent = selection.candidates[i].parent
            cause = Cause(CauseKind.BEAM_SURVIVES, {"rank": rank, "beam_width": width})
            becomes[i] = beams[parent] if heir[parent] == i else self._fork(beams[parent], cause)
        dropped = [beam for parent, beam in enumerate(beams) if parent not in heir]
        group.living = [becomes[i] for i in kept] + dropped
        dropped_because = Cause(CauseKind.BEAM_DROPPED, {"beam_width": width})
        if selection.is_over:
            num_finished = min(width, len(group.hypotheses.entries) + len(selection.finished))
            dropped_because = Cause(CauseKind.BEAMS_FINISHED, {"num_finished": num_finished})
        for beam in dropped:
            self._finish(beam, SequenceStatus.FINISHED_DROPPED, dropped_because)
        for rank, i in enumerate(kept):
            candidate, sequence = selection.candidates[i], becomes[i]
            sequence.cumulative_logprob = candidate.cumulative_logprob
            if candidate.forced:
                model_token_id = said[candidate.parent]
                cause = Cause(CauseKind.FORCED, {} if model_token_id is None else {"model_token_id": model_token_id})
            else:
                cause = Cause(CauseKind.BEAM_SURVIVES, {"rank": rank, "beam_width": width})
            self._append(sequence, candidate.token_id, cause)
        for i in selection.finished:
            sequence = becomes[i]
            end = self._end_of(sequence)
            assert end is not None
            group.hypotheses.add(group.hypotheses.score(sequence.cumulative_logprob, sequence.num_output_tokens), sequence)
            self._finish(sequence, *end)


def _answer(outputs: dict[str, SequenceOutput], sequence: Sequence) -> SequenceOutput:
    if sequence.sequence_id not in outputs:
        raise EngineError(f"the worker was asked for {sequence.sequence_id} and did not answer")
    return outputs[sequence.sequence_id]
