"""What touches tensors: physical keys and values, block tables as kernels read them, the model's attention, and the choice of the next token."""

from __future__ import annotations

from engine.libraries import load_libraries

load_libraries()  # before any module of this package asks for its part of them
