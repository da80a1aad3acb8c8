"""What a test may need beside Python: a browser and the larger models' weights. Missing, they skip on a person's machine and fail in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
WEIGHTS = "smollm2-135m"
"""The model that `weights` means when the marker names none."""

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


def weights_of(item: pytest.Item) -> str | None:
    """The model whose weights the test needs: the one that its marker names, or that the scene runs which is its parameter “scene”."""
    marker = item.get_closest_marker("weights")
    if marker is not None:
        return str(marker.args[0]) if marker.args else WEIGHTS
    parameters = getattr(item, "callspec", None)
    scene = parameters.params.get("scene") if parameters is not None else None
    return pulled_models_of_scenes().get(scene) if isinstance(scene, str) else None


@cache
def pulled_models_of_scenes() -> dict[str, str]:
    """Scene -> its model, for those that run a model that must be pulled."""
    from engine.models.pull import SOURCES
    from scenarios import list_scenarios

    return {info.id: info.model for info in list_scenarios() if info.model in SOURCES}


def has_weights(model: str) -> bool:
    """Whether the larger model is in the user's cache."""
    from engine.models import list_models

    return any(info.name == model and info.installed for info in list_models())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    browser = [item for item in items if item.get_closest_marker("browser")]
    if browser and find_chromium() is None:
        if IN_CI:
            raise pytest.UsageError("the browser tests must run in CI, but no Chromium was found: install Debian's chromium or set PAGEWALK_CHROMIUM")
        for item in browser:
            item.add_marker(pytest.mark.skip(reason="no Chromium found: install it or set PAGEWALK_CHROMIUM to its path"))
    for item in browser:
        item.add_marker(pytest.mark.xdist_group("browser"))  # with several test processes: one browser at a time
    for item in items:
        if model := weights_of(item):
            item.add_marker(pytest.mark.xdist_group(f"weights {model}"))  # one download, and one process that holds the weights
            if not IN_CI and not has_weights(model):
                item.add_marker(pytest.mark.skip(reason=f"the weights are not here: python -m engine.models pull {model}"))


@pytest.fixture(autouse=True)
def _weights_in_ci(request: pytest.FixtureRequest) -> None:
    """In CI the first test that needs a model's weights pulls them, through the command that users run. Its terms are accepted for the tests."""
    model = weights_of(request.node)
    if model is None or has_weights(model):
        return
    command = [sys.executable, "-m", "engine.models", "pull", model, "--accept-licence"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    while "Another pull is writing" in result.stderr:  # another test process was first
        time.sleep(2)
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
