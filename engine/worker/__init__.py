"""What touches tensors: physical keys and values, block tables as kernels read them, the model's attention, and the choice of the next token."""

from __future__ import annotations
