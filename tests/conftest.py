"""What a test may need beside Python: a browser and the larger model's weights. Missing, they skip on a person's machine and fail in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
WEIGHTS = "smollm2-135m"

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("deep", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def find_chromium() -> str | None:
    """The browser's path: `PAGEWALK_CHROMIUM`, or the first usual name on PATH."""
    named = os.environ.get("PAGEWALK_CHROMIUM")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
    return named or next((path for name in names if (path := shutil.which(name))), None)


def has_weights() -> bool:
    """Whether the larger model is in the user's cache."""
    from engine.models import list_models

    return any(info.name == WEIGHTS and info.installed for info in list_models())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    browser = [item for item in items if item.get_closest_marker("browser")]
    if browser and find_chromium() is None:
        if IN_CI:
            raise pytest.UsageError("the browser tests must run in CI, but no Chromium was found: install Debian's chromium or set PAGEWALK_CHROMIUM")
        for item in browser:
            item.add_marker(pytest.mark.skip(reason="no Chromium found: install it or set PAGEWALK_CHROMIUM to its path"))
    weights = [item for item in items if item.get_closest_marker("weights")]
    for name, together in (("browser", browser), ("weights", weights)):
        for item in together:  # with several test processes: one browser at a time, one download
            item.add_marker(pytest.mark.xdist_group(name))
    if weights and not IN_CI and not has_weights():
        for item in weights:
            item.add_marker(pytest.mark.skip(reason=f"the weights are not here: python -m engine.models pull {WEIGHTS}"))


@pytest.fixture(autouse=True)
def _weights_in_ci(request: pytest.FixtureRequest) -> None:
    """In CI the first test that needs the weights pulls them, through the command that users run."""
    if request.node.get_closest_marker("weights") is None or has_weights():
        return
    result = subprocess.run([sys.executable, "-m", "engine.models", "pull", WEIGHTS], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
