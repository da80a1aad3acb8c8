"""Files: the same trace gives the same bytes, comes back equal and sharing, and anything else is refused in one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from engine.errors import InvalidInput
from engine.trace import codec
from engine.trace.events import EVENT_KINDS, AnyEvent, kind_of
from engine.trace.frame import Trace
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


def test_another_version_says_both_versions() -> None:
    data = json.loads(codec.encode_json(two_frames()))
    data["version"] = 99
    with pytest.raises(InvalidInput, match=r"t.json is a trace of version 99, but this Pagewalk reads version 2: run its scenario again"):
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
