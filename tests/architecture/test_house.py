"""The house keeps its seams: linters, types, imports, file sizes, and words that do not belong."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "kernels", "views", "scenarios", "tests")
AS_RECORDED = "oracle_driver.py"  # drives real vLLM; kept as it was when the runs of tests/conformance were recorded


def sources(*suffixes: str) -> list[Path]:
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in suffixes and "__pycache__" not in p.parts and p.name != AS_RECORDED]
    return [*files, *(p for p in ROOT.glob("*.py") if p.suffix in suffixes)]


def tool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_ruff_finds_nothing() -> None:
    result = tool("ruff", "check", "--no-cache", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_everything_is_formatted() -> None:
    result = tool("ruff", "format", "--no-cache", "--check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_is_strict_and_silent() -> None:
    result = tool("mypy")
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_contracts_hold() -> None:
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("suffix", [".py", ".js", ".css"])
def test_no_file_passes_400_lines(suffix: str) -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources(suffix) if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert long == {}, "split these files: one idea each"


def test_session_state_and_caches_live_in_one_module() -> None:
    pattern = re.compile(r"\bst\.(session_state|cache_)")
    offenders = [p for p in sources(".py") if p.is_relative_to(ROOT / "views") and p.name != "state.py" and pattern.search(p.read_text(encoding="utf-8"))]
    assert offenders == []


def test_importing_what_decides_loads_no_torch() -> None:
    """Seam 2, at run time: not even by way of a third module."""
    code = (
        "import sys, engine.core.scheduler, engine.trace.codec, engine.session, scenarios, engine.models;"
        "sys.exit(','.join(m for m in ('torch', 'triton', 'transformers', 'streamlit') if m in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_pins_are_exact() -> None:
    """Plain ranges for torch cost gigabytes, and what is not pinned is not what was tested."""
    lines = [line.split(";")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    assert "torch==2.13.0" in lines
    assert "triton==3.7.1" in lines


def test_supported_pythons_are_stated() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"


def test_every_room_has_its_readme() -> None:
    missing = [room for room in (*ROOMS, ".") if not (ROOT / room / "README.md").is_file()]
    assert missing == []


def test_a_first_start_asks_no_questions() -> None:
    """One command, then a browser: no prompt for an address in the terminal, no usage statistics."""
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["server"]["showEmailPrompt"] is False
    assert config["browser"]["gatherUsageStats"] is False


def test_an_app_that_nobody_uses_is_idle() -> None:
    """Streamlit's watcher keeps a processor core busy when the virtual environment lies in the app's folder, where the README puts it."""
    config = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    assert config["server"]["fileWatcherType"] == "none"
