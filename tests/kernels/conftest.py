"""Ragged batches and what attention over them must be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.ragged import Batch, dense_attention, make_batch


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def dense() -> Callable[..., Tensor]:
    return dense_attention
