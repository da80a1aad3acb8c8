"""Blocks saved by sharing: counted without a recording they are those of the recorded frames, and for parallel sampling those of the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import InvalidInput
from engine.models import load_tokenizer
from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper.sharing import measure_sharing, parallel_sampling_saved
from engine.paper_session import PaperSession
from engine.sharing_runs import run_and_measure_sharing
from scenarios.sharing_requests import MODEL, Decoding, sharing_config, sharing_lengths, sharing_requests


@pytest.mark.parametrize(("decoding", "width"), [("parallel_sampling", 3), ("beam_search", 3)])
def test_counting_while_running_equals_counting_in_the_recorded_frames(decoding: Decoding, width: int) -> None:
    requests = tuple(replace(spec, max_tokens=min(spec.max_tokens, 9)) for spec in sharing_requests(decoding, width)[:3])
    config = sharing_config(4, width)
    run = run_and_measure_sharing(requests, config, MODEL)
    session = PaperSession(config, requests, vocabulary=load_tokenizer(MODEL).token_text, model_name=MODEL, interpreted_layers=())
    session.run_to_end()
    assert session.error is None
    assert run.together == measure_sharing(session.trace.frames)
    assert len(run.each) == 3


@pytest.mark.parametrize("width", [2, 4])
def test_samples_save_exactly_what_their_lengths_say(width: int) -> None:
    """Section 4.4: samples share the full blocks of the prompt for as long as they run; what the model says does not matter. The first iteration computes
    the prompt once, and in the k-th a sample has prompt_len + k - 1 tokens in its blocks."""
    run = run_and_measure_sharing(sharing_requests("parallel_sampling", width), sharing_config(16, width), MODEL)
    for request, sharing in zip(sharing_lengths(), run.each, strict=True):
        shared, prompt_blocks = request.prompt_len // 16, -(-request.prompt_len // 16)
        tables = [-(-(request.prompt_len + k - 1) // 16) for k in range(2, request.output_len + 1)]
        assert [p.blocks_without for p in sharing.points] == [prompt_blocks, *(width * blocks for blocks in tables)]
        assert [p.blocks_with for p in sharing.points] == [prompt_blocks, *(shared + width * (blocks - shared) for blocks in tables)]
    assert run.together.saved_percent == pytest.approx(parallel_sampling_saved(sharing_lengths(), width, 16), abs=0.05)


def test_beams_save_more_than_samples() -> None:
    """Figure 15: with the same width, beam search saves several times as much as parallel sampling."""
    saved = [run_and_measure_sharing(sharing_requests(d, 2), sharing_config(16, 2), MODEL).together.saved_percent for d in ("parallel_sampling", "beam_search")]
    assert saved[1] > 2 * saved[0] > 0


def test_the_lengths_are_like_alpacas() -> None:
    """Figure 11b: on average 19.31 prompt and 58.45 output tokens."""
    lengths = sharing_lengths()
    assert sum(r.prompt_len for r in lengths) / len(lengths) == pytest.approx(19.31, abs=1.0)
    assert sum(r.output_len for r in lengths) / len(lengths) == pytest.approx(58.45, abs=4.0)
    requests = sharing_requests("beam_search", 6)
    assert [len(spec.prompt_token_ids) for spec in requests] == [r.prompt_len for r in lengths]
    assert [spec.max_tokens for spec in requests] == [r.output_len for r in lengths]
    assert len({spec.prompt_token_ids[:8] for spec in requests}) >= len(requests) - 1  # two passages begin alike


@pytest.mark.parametrize("decoding", ["parallel_sampling", "beam_search"])
def test_a_pool_that_is_too_small_is_refused_instead_of_counted_wrongly(decoding: Decoding) -> None:
    with pytest.raises(InvalidInput, match="too few for all requests at once"):
        run_and_measure_sharing(sharing_requests(decoding, 2), replace(sharing_config(16, 2), num_blocks=20), MODEL)
    with pytest.raises(InvalidInput, match="too few for all requests at once"):
        run_and_measure_sharing(sharing_requests(decoding, 2), replace(sharing_config(16, 2), max_num_seqs=4), MODEL)


@pytest.mark.parametrize("width", [0, 1])
def test_less_than_two_outputs_share_nothing(width: int) -> None:
    with pytest.raises(InvalidInput, match="at least 2 outputs"):
        sharing_requests("parallel_sampling", width)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidInput, match="vocabulary"):
        run_and_measure_sharing([PaperRequestSpec("A", (10**6,))], PaperConfig(num_blocks=8, block_size=4), MODEL)
