"""Files: the same trace gives the same bytes, comes back equal and sharing, and anything else is refused in one sentence."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from engine.core.output import SamplingParams
from engine.errors import InvalidInput
from engine.session import Session
from engine.session_config import RequestSpec, SessionConfig
from engine.trace import codec, codec_wire
from engine.trace.events import EVENT_KINDS, AnyEvent, RequestPreempted, kind_of
from engine.trace.frame import Trace, WorkerRow
from engine.trace.shared_sequence import SharedSequence
from tests.unit.trace import frames as f


def two_frames() -> Trace:
    first = f.frame()
    return f.trace(first, msgspec.structs.replace(first, seq=1, event=f.write([10], [16])))


def test_round_trip_is_exact_and_shares_what_did_not_change() -> None:
    trace = two_frames()
    data = codec.encode_json(trace)
    back = codec.decode_json(data)
    assert back == trace
    assert codec.encode_json(back) == data
    assert back.frames[0].blocks[1] is back.frames[1].blocks[1]
    assert len(json.loads(data)["block_states"]) == 4


def recorded(num_blocks: int = 16) -> Trace:
    """Two requests that share a prefix and preempt each other in a small pool."""
    requests = tuple(
        RequestSpec(name, tuple(range(18)), SamplingParams(max_tokens=22, forced_token_ids=tuple(range(22))), arrival_step=step)
        for name, step in (("A", 1), ("B", 3))
    )
    return Session(SessionConfig(num_blocks=num_blocks, block_size=4), requests, vocabulary=str).run_to_end()


def test_a_recorded_run_comes_back_sharing_as_much_as_the_live_one() -> None:
    trace = recorded()
    assert any(isinstance(frame.event, RequestPreempted) for frame in trace.frames)
    back = codec.decode_json(codec.encode_json(trace))
    assert back == trace
    for frames in (trace.frames, back.frames):
        for before, frame in pairwise(frames):
            for name in ("blocks", "free_queue", "hash_map", "requests"):
                new, old = getattr(frame, name), getattr(before, name)
                assert isinstance(new, SharedSequence)
                assert (new is old) == (new == old)


def test_however_frames_keep_their_sequences_the_bytes_are_the_same() -> None:
    trace = recorded()
    names = ("blocks", "free_queue", "hash_map", "requests")
    frames = [msgspec.structs.replace(frame, **{name: tuple(getattr(frame, name)) for name in names}) for frame in trace.frames]
    assert codec.encode_json(Trace(trace.header, frames, trace.complete)) == codec.encode_json(trace)


def test_a_frame_of_a_large_pool_is_written_as_what_changed() -> None:
    """4,096 blocks, two requests of ten: a frame after the first one names about as many blocks as its event, and the queue by what left and joined."""
    trace = recorded(4_096)
    frames = json.loads(codec.encode_json(trace))["frames"]
    assert len(frames[0]["blocks"]) == 4_096
    assert len(frames[0]["free_queue"]["whole"]) == 4_095
    assert sum(len(frame.get("blocks", ())) for frame in frames[1:]) < 2 * len(frames)
    moved = [frame["free_queue"] for frame in frames[1:] if "free_queue" in frame]
    assert 0 < sum(len(ids) for moves in moved for ids in moves.values()) < 100


def test_lists_that_grow_stand_once() -> None:
    """A's 40 tokens and ten hashes grow one by one through the whole run."""
    data = json.loads(codec.encode_json(recorded()))
    assert sum(len(ids) == 40 for ids in data["int_lists"]) == 2
    assert [len(digests) for digests in data["hash_lists"]] == [10, 10]


def test_what_stands_behind_a_row_comes_back() -> None:
    """R8.2: the end of a longer row; a row without one is written as before."""
    rows = (WorkerRow(0, "A", ((7, 8, 9), ())), WorkerRow(0, "A", ((7, 8, 9), ()), ((4, 5, 6), ())))
    first = f.frame()
    trace = f.trace(*(msgspec.structs.replace(first, seq=seq, rows=(row,)) for seq, row in enumerate(rows)))
    back = codec.decode_json(data := codec.encode_json(trace))
    assert [frame.rows for frame in back.frames] == [(row,) for row in rows]
    assert [entry.get("stale_block_ids") for entry in json.loads(data)["worker_rows"]] == [None, [[4, 5, 6], []]]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_files_are_the_same_bytes_every_time(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        codec.save(two_frames(), tmp_path / folder / name)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert codec.load(tmp_path / "a" / name) == two_frames()
    assert [p.name for p in (tmp_path / "a").iterdir()] == [name]


def test_every_event_kind_has_its_own_tag() -> None:
    assert len(set(EVENT_KINDS)) == len(AnyEvent.__args__)
    assert kind_of(f.write([1], [1])) == "kv_written"


def test_a_trace_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    codec.save(two_frames(), tmp_path / "t.json.gz")
    plain = codec.encode_json(two_frames())
    packed = (tmp_path / "t.json.gz").read_bytes()
    for data in [plain[:n] for n in range(0, len(plain), 97)] + [packed[:n] for n in range(0, len(packed), 41)]:
        (tmp_path / "cut").write_bytes(data)
        with pytest.raises(InvalidInput) as caught:
            codec.load(tmp_path / "cut")
        assert str(caught.value).startswith("cut is not a")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [3, 99])
def test_another_version_says_both_versions(version: int) -> None:
    """Version 3 is refused, too: its states did not say what they were computed from, so the check of states would call a sound run broken."""
    data = json.loads(codec.encode_json(two_frames()))
    data["version"] = version
    with pytest.raises(InvalidInput, match=rf"t.json is a trace of version {version}, but this Pagewalk reads version 4: run its scenario again"):
        codec.decode_json(json.dumps(data).encode(), "t.json")


def test_a_file_that_unfolds_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One list may be named by many states."""
    data = codec.encode_json(recorded())
    monkeypatch.setattr(codec_wire, "MAX_ELEMENTS", 100)
    with pytest.raises(InvalidInput, match=r"t\.json unfolds to more than 100 list elements, which is more than a trace may have"):
        codec.decode_json(data, "t.json")


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("frames.1.blocks", [[99, 0]]),
        ("frames.1.num_blocks", 7),
        ("frames.1.num_blocks", -1),
        ("frames.1.free_queue", {"out": [99]}),
        ("frames.1.free_queue", {"tail": [3]}),
        ("frames.1.hash_map", {"out": ["ab:0"], "tail": [["cd:0", [1]], ["cd:0", [1]]]}),
        ("frames.1.requests", [[0, 5]]),
        ("frames.1.rows", [0]),
        ("request_states.0.token_ids", [0, 7]),
        ("request_states.0.token_ids", [0, -1]),
        ("request_states.0.token_ids", [-1, 1]),
        ("request_states.0.block_hashes", [1, 0]),
    ],
)
def test_what_does_not_fit_together_is_found(table: str, value: object) -> None:
    data = json.loads(codec.encode_json(two_frames()))
    place = data
    *path, last = table.split(".")
    for part in path:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    with pytest.raises(InvalidInput, match=r"t\.json is damaged: a frame refers to something that is not in the file; record it again"):
        codec.decode_json(json.dumps(data).encode(), "t.json")


@pytest.mark.parametrize("damage", ["index", "negative", "type", "unknown_event"])
def test_damage_inside_is_found(damage: str) -> None:
    data = json.loads(codec.encode_json(two_frames()))
    frame = data["frames"][0]
    if damage == "index":
        frame["blocks"][0] = [0, 1000]
    elif damage == "negative":
        frame["blocks"][0] = [-1, 0]
    elif damage == "type":
        frame["seq"] = "zero"
    else:
        frame["event"]["kind"] = "block_eaten"
    with pytest.raises(InvalidInput, match=r"t\.json is damaged: "):
        codec.decode_json(json.dumps(data).encode(), "t.json")


@pytest.mark.parametrize("data", [b"{}", b"[]", b"null", b"\xff\xfe\x00", b'{"format": "other", "version": 1}', b"[" * 100_000])
def test_other_files_are_no_traces(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"x\.json is not a"):
        codec.decode_json(data, "x.json")


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(InvalidInput, match=r"bomb\.gz unpacks to more than"):
        codec.load(tmp_path / "bomb.gz")


def test_no_file_and_no_place(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        codec.load(tmp_path / "missing.json")
    with pytest.raises(InvalidInput, match="cannot be written"):
        codec.save(two_frames(), tmp_path / "no folder" / "t.json")
