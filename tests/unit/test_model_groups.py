"""From a model's config.json to its KV-cache groups (R4.2), and a run whose groups come from the model beside one that is told them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.core.output import SamplingParams
from engine.core.sliding_window_manager import SlidingWindowManager
from engine.errors import InvalidInput
from engine.models import kv_cache_groups_of, load_tokenizer, sliding_window_of
from engine.models.layer_groups import layer_types
from engine.models.tiny_tokenizer import TINY_SWA_DIR
from engine.session import InterpretedLayers, RequestSpec, Session, SessionConfig
from engine.trace.events import AttentionComputed, KVWritten, RowUpdated, SlotsMapped
from engine.trace.frame import Frame, Trace


def folder_with(path: Path, **config: Any) -> str:
    """A model folder that says these things of itself; what groups need and nothing more."""
    path.mkdir(exist_ok=True)
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    (path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"], **shape, **config}))
    (path / "tokenizer.json").write_bytes((TINY_SWA_DIR / "tokenizer.json").read_bytes())
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


def shapes(groups: Any) -> list[tuple[str, list[int]]]:
    return [(group.type, [int(name.removeprefix("layers.")) for name in group.layer_names]) for group in groups]


def test_tiny_swa_has_two_groups_of_windows_and_one_of_full_attention() -> None:
    groups = kv_cache_groups_of("tiny-swa", 4)
    assert shapes(groups) == [("sliding_window", [0, 3]), ("sliding_window", [1, 4]), ("full", [2, 5])]
    assert [group.sliding_window for group in groups] == [8, 8, None]
    assert sliding_window_of("tiny-swa") == 8


def test_a_model_with_full_attention_only_keeps_its_one_group() -> None:
    assert kv_cache_groups_of("tiny", 4) == ()
    assert sliding_window_of("tiny") is None


def test_r4_2_ten_full_and_twenty_windows_are_three_groups_of_ten(tmp_path: Path) -> None:
    model = folder_with(tmp_path / "m", layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 10, sliding_window=512)
    groups = kv_cache_groups_of(model, 16)
    assert shapes(groups) == [("sliding_window", [*range(0, 30, 3)]), ("sliding_window", [*range(1, 30, 3)]), ("full", [*range(2, 30, 3)])]


def test_r4_2_gemma_3_270m_has_five_groups_of_three_windows_and_one_of_three_full_layers(tmp_path: Path) -> None:
    """18 layers, every sixth of them full; the groups are those that get_kv_cache_groups of vLLM 0.27.0 makes of them."""
    model = folder_with(tmp_path / "m", layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3, sliding_window=512)
    groups = kv_cache_groups_of(model, 16)
    assert shapes(groups) == [("sliding_window", [first, first + 6, first + 12]) for first in range(5)] + [("full", [5, 11, 17])]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 8}, [0, 1, 2, 3, 4, 6, 7]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window_pattern": 3}, [0, 1, 3, 4]),
        ({"model_type": "mistral", "num_hidden_layers": 3}, [0, 1, 2]),
        ({"model_type": "qwen3", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2}, [2, 3]),
        ({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": False, "max_window_layers": 2}, []),
        ({"model_type": "llama", "num_hidden_layers": 4}, []),
    ],
)
def test_configs_without_layer_types_are_read_as_transformers_reads_them(config: dict[str, Any], windows: list[int]) -> None:
    from transformers import AutoConfig

    types = layer_types({**config, "sliding_window": 6})
    assert [layer for layer, kind in enumerate(types) if kind == "sliding_attention"] == windows
    theirs = AutoConfig.for_model(**{**config, "sliding_window": 6})
    if getattr(theirs, "layer_types", None):
        assert types == theirs.layer_types


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    def session(model: str, **settings: Any) -> Session:
        config = SessionConfig(num_blocks=24, block_size=4, **settings)
        request = RequestSpec("A", (1, 2, 3), SamplingParams(max_tokens=1, forced_token_ids=(1,)))
        return Session(config, (request,), vocabulary=str, model_name=model)

    with pytest.raises(InvalidInput, match=r"^sliding_window is 0, but a token sees at least itself; give 1 or more$"):
        session("tiny-swa", sliding_window=0)
    with pytest.raises(InvalidInput, match=r"^sliding_window is 4, but every layer of tiny sees all tokens; leave it out, or take the model tiny-swa$"):
        session("tiny", sliding_window=4)
    with pytest.raises(InvalidInput, match=r"^sliding_window is 4, but without a model there is no window to replace; name a group with this window$"):
        session("none", sliding_window=4)
    with pytest.raises(InvalidInput, match="the KV-cache groups of tiny-swa come from its layers"):
        session("tiny-swa", kv_cache_groups=kv_cache_groups_of("tiny-swa", 4))
    mamba = folder_with(tmp_path / "m", layer_types=["mamba", "full_attention"])
    with pytest.raises(
        InvalidInput, match=r"has layers of the type mamba, which Pagewalk cannot run; bring a model of attention layers only, or a Bamba model$"
    ):
        session(mamba)
    nameless = folder_with(tmp_path / "n", layer_types=["sliding_attention"])
    with pytest.raises(InvalidInput, match=r"has sliding-window layers, but its config.json says no sliding_window; get its files again$"):
        session(nameless)
    foreign = folder_with(tmp_path / "f", architectures=["FalconForCausalLM"])
    with pytest.raises(InvalidInput, match="has the architecture FalconForCausalLM, which Pagewalk cannot run"):
        session(foreign)


# ---------------------------------------------------------------------- the same run without the model


def real_run(layers: InterpretedLayers = (), **settings: Any) -> Session:
    tokenizer = load_tokenizer("tiny-swa")
    speech = "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty"
    requests = (
        RequestSpec("A", tuple(tokenizer.encode(speech)), SamplingParams(max_tokens=24)),
        RequestSpec("B", tuple(tokenizer.encode("It was the best of times, it was the worst")), SamplingParams(max_tokens=12), arrival_step=6),
        RequestSpec("C", tuple(tokenizer.encode(speech)), SamplingParams(max_tokens=6), arrival_step=12),
    )
    config = SessionConfig(num_blocks=40, block_size=4, max_num_batched_tokens=12, **settings)
    return Session(config, requests, vocabulary=tokenizer.token_text, model_name="tiny-swa", interpreted_layers=layers)


def told_what_to_say(session: Session, trace: Trace) -> Trace:
    """The same scenario without a model: its groups are named, and its outputs are those that the model gave."""
    outputs = {r.request_id: tuple(r.token_ids[r.num_prompt_tokens :]) for r in trace.frames[-1].requests}
    requests = tuple(
        RequestSpec(r.request_id, r.prompt_token_ids, SamplingParams(r.sampling_params.max_tokens, forced_token_ids=outputs[r.request_id]), r.arrival_step)
        for r in session._inputs["requests"]
    )
    given = session.config
    config = SessionConfig(
        num_blocks=given.num_blocks,
        block_size=4,
        max_num_batched_tokens=12,
        enable_prefix_caching=given.enable_prefix_caching,
        kv_cache_groups=given.model_groups,
    )
    return Session(config, requests, vocabulary=str).run_to_end()


def accounts(frame: Frame) -> tuple[Any, ...]:
    """All that the memory manager keeps, and what the worker's rows say."""
    requests = [(r.request_id, r.status, r.token_ids, r.num_computed_tokens, r.block_ids, r.block_hashes, r.num_cached_block) for r in frame.requests]
    rows = {row.request_id: row.block_ids for row in frame.rows}
    return list(frame.blocks), list(frame.free_queue), list(frame.hash_map), requests, frame.running, frame.waiting, rows


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"sliding_window": 3}], ids=["caching", "no caching", "window 3"])
def test_the_blocks_are_those_of_a_run_without_a_model(settings: dict[str, Any]) -> None:
    """Same groups, same tokens: the same blocks, hashes, queue, tables, rows and slots after every operation, though one run computes and the other only
    keeps books."""
    session = real_run(**settings)
    trace = session.run_to_end()
    assert trace.complete
    books = told_what_to_say(session, trace)
    ends = [{frame.op_index: frame for frame in run.frames} for run in (trace, books)]
    assert ends[0].keys() == ends[1].keys()
    for index, frame in ends[0].items():
        assert accounts(frame) == accounts(ends[1][index]), (frame.step, frame.op)

    def events(run: Trace, kind: type) -> list[Any]:
        found = [f.event for f in run.frames if isinstance(f.event, kind)]
        return sorted((e.group_id, str(e.request_id), e.positions if kind is SlotsMapped else [], e.slots) for e in found)  # type: ignore[attr-defined]

    assert events(trace, SlotsMapped) == events(books, SlotsMapped)
    assert events(trace, KVWritten) == events(books, KVWritten)
    assert {f.event.group_id for f in trace.frames if isinstance(f.event, RowUpdated)} == {0, 1, 2}
    assert [f.event.num_layers for f in trace.frames if isinstance(f.event, KVWritten)][:3] == [2, 2, 2]


def test_a_smaller_window_is_the_models_window_in_every_respect() -> None:
    """The header says it, the groups have it, and a branch can change it back."""
    session = real_run(sliding_window=3)
    assert session.trace.header.model["sliding_window"] == 8
    assert session.trace.header.config["sliding_window"] == 3
    assert [g.get("sliding_window") for g in session.trace.header.config["kv_cache_groups"]] == [3, 3, None]
    other = session.branch(0, sliding_window=None)
    assert [g.get("sliding_window") for g in other.trace.header.config["kv_cache_groups"]] == [8, 8, None]


def test_a_model_of_windows_alone_runs_past_what_its_pool_can_hold(tmp_path: Path) -> None:
    """Mistral: every layer has the window, so there is one group: 58 tokens go through seven blocks of four, as transformers says them."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=load_tokenizer("tiny-swa").vocab_size, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=6, initializer_range=0.3, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((TINY_SWA_DIR / "tokenizer.json").read_bytes())
    name, prompt = str(tmp_path), tuple(range(300, 318))
    assert shapes(kv_cache_groups_of(name, 4)) == [("sliding_window", [0, 1])]
    settings = SessionConfig(num_blocks=8, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    session = Session(settings, (RequestSpec("A", prompt, SamplingParams(max_tokens=40)),), vocabulary=str, model_name=name)
    trace = session.run_to_end()
    assert session.error is None
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
    assert list(trace.frames[-1].requests[0].token_ids) == expected


def test_attention_shares_name_the_group_of_their_layer() -> None:
    """Layer 2 has full attention and is in group 2; layer 0 has a window, so blocks that it has left get nothing."""
    for layer, group_id in ((2, 2), (0, 0)):
        tokenizer = load_tokenizer("tiny-swa")
        request = RequestSpec("A", tuple(tokenizer.encode("Four score and seven years ago our fathers brought forth")), SamplingParams(max_tokens=8))
        config = SessionConfig(num_blocks=40, block_size=4, attention_shares=True)
        session = Session(config, (request,), vocabulary=tokenizer.token_text, model_name="tiny-swa", interpreted_layers=(layer,))
        frames = [f for f in session.run_to_end().frames if isinstance(f.event, AttentionComputed)]
        event = frames[-1].event
        assert isinstance(event, AttentionComputed)
        assert (event.shares_layer, event.group_id) == (layer, group_id)
        (shares,) = event.block_shares
        assert sum(shares) == pytest.approx(1, abs=1e-6)
        table = frames[-1].requests[0].block_ids[group_id]
        assert [share == 0 for share in shares] == [block_id == 0 for block_id in table]


def test_no_kernel_program_reads_what_a_window_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in the kernels themselves, in all six layers and every frame. With a window freed one block too early (the mutation) the frame that shows it is the
    last one, and says which request's program read which block."""
    session = real_run("all", kernel_witness=True)
    trace = session.run_to_end()
    assert session.error is None
    witnessed = [f.event.witness for f in trace.frames if isinstance(f.event, AttentionComputed)]
    assert len(witnessed) > 20
    assert all(witnessed)

    true = SlidingWindowManager.get_num_skipped_tokens
    monkeypatch.setattr(SlidingWindowManager, "get_num_skipped_tokens", lambda self, computed: true(self, computed) + (4 if computed > 12 else 0))
    broken = real_run("all", kernel_witness=True)
    broken.run_to_end()
    said = r"“a kernel program reads only its own request's blocks”: program 0, lane 0 of paged_attention in layers 0, 3 read keys of block 10 for A"
    assert re.search(said, str(broken.error))
