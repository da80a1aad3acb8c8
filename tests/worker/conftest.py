from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.worker.harness import random_llama, untouched_copy


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The model whose attention is redirected; shared by all tests, as engines share it."""
    return random_llama()


@pytest.fixture(scope="session")
def reference(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    return untouched_copy(random_llama())
