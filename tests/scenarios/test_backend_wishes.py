"""A backend that the environment asks for and that cannot run: refused before the run begins, with the name of the variable."""

from __future__ import annotations

import pytest

from scenarios.__main__ import INVALID, OK, main


@pytest.mark.parametrize("scene", ["figure-6", "figure-6-v1", "hybrid-state-live"])
@pytest.mark.parametrize(("wish", "says"), [("fast", "There is no backend 'fast'"), ("triton", "Backend 'triton' cannot run here")])
def test_the_environment_is_named_and_nothing_begins(
    scene: str, wish: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEWALK_BACKEND", wish)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", scene]) == INVALID
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{says} (PAGEWALK_BACKEND asks for it)")
    assert main(["run", scene, "--backend", "torch"]) == OK  # what is asked for here counts more
