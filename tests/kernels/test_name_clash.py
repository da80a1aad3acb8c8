"""The folder `kernels/` shares its name with a distribution that transformers may import."""

from __future__ import annotations

import importlib.metadata


def test_the_distribution_named_kernels_is_not_installed():
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    assert "kernels" not in installed, (
        "The PyPI distribution 'kernels' is installed: transformers would import it by the bare name of this project's folder kernels/ and fail;"
        " remove it with `pip uninstall kernels`."
    )
