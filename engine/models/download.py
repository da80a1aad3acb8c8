"""A file from an address to the disk, resumable; and pip's word on where a pinned wheel lies."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from engine.errors import PagewalkError

CHUNK = 1 << 18
TIMEOUT_SECONDS = 30
ATTEMPTS = 3

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known


class DownloadError(PagewalkError):
    """The network, pip or the other side did not give the file. What has arrived so far stays for the next attempt."""


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _pip_error(requirement: str, stderr: str) -> DownloadError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")
    return DownloadError(f"pip could not find {requirement} ({reason}): check the network and pip's settings, then run the same command again.")


def address_from_pip(requirement: str) -> str:
    """The address of the wheel that pip, with the user's own settings, would install; its dependencies are left out. Raises DownloadError."""
    wanted = ("--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-", requirement)
    result = _pip("install", *wanted)
    try:
        if result.returncode != 0:
            raise ValueError(result.stderr)
        return str(json.loads(result.stdout)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise _pip_error(requirement, result.stderr) from error


def download_with_pip(requirement: str, folder: Path) -> Path:
    """Lets pip itself fetch the wheel into `folder` (for indexes with passwords or certificates of their own). Raises DownloadError."""
    result = _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise _pip_error(requirement, result.stderr)
    return wheels[0]


def sha256_of(file: Path) -> str:
    """Hex digest of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def needs_pip(error: BaseException) -> bool:
    """Whether the other side wants what only pip's settings know: a password, a client certificate, an authority of one's own."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (401, 403, 407)
    return isinstance(error, urllib.error.URLError) and "SSL" in type(error.reason).__name__


def download(address: str, part: Path, progress: Progress) -> None:
    """Completes `part` from `address`, going on where it ends if the server can (HTTP Range), else from the start.

    Raises urllib's HTTPError / URLError when `needs_pip` says so, DownloadError when the connection fails `ATTEMPTS` times, OSError from the disk.
    """
    last: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            _download_once(address, part, progress)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and part.exists():  # nothing left after what we have, or it is another file's: start over
                part.unlink()
                last = error
                continue
            if needs_pip(error):
                raise
            raise DownloadError(f"The server answered {error.code} ({error.reason}) for {_file_name(address)}: try again later.") from error
        except urllib.error.URLError as error:
            if needs_pip(error):
                raise
            last = error
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            last = error
    reason = getattr(last, "reason", None) or str(last) or type(last).__name__
    arrived = part.stat().st_size if part.exists() else 0
    raise DownloadError(
        f"The download of {_file_name(address)} stopped after {arrived / 1e6:.1f} MB ({reason}): "
        "check the network and run the same command again, it goes on from there."
    ) from last


def _file_name(address: str) -> str:
    return address.split("?")[0].split("#")[0].rsplit("/", 1)[-1]


def _download_once(address: str, part: Path, progress: Progress) -> None:
    offset = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={offset}-"} if offset else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        resumed = offset > 0 and response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
        done = offset if resumed else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if resumed else "wb") as sink:
            while chunk := response.read(CHUNK):
                sink.write(chunk)
                done += len(chunk)
                progress(done, total)
    if total is not None and done < total:
        raise ConnectionError("the connection ended early")
