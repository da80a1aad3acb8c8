"""Writes a safetensors file piece by piece, so that weights of any size need the memory of one piece. Needs no torch.

Format: eight bytes with the length of a JSON header, the header, the tensors' bytes without gaps. For float32 tensors the file has the very bytes that the
safetensors library would write (it sorts by name and fills the header up with spaces).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

HEADER_ALIGNMENT = 8
FLOAT32_BYTES = 4

Pieces = Callable[[], Iterator[npt.NDArray[np.float32]]]
"""Makes a tensor's numbers, float32, in order, in pieces of any shape."""


def write_float32(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], Pieces]]) -> None:
    """Writes float32 tensors, name -> (shape, pieces), to `path`. Raises ValueError when pieces and shape disagree, OSError from the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        shape = tensors[name][0]
        begin, end = end, end + math.prod(shape) * FLOAT32_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            shape, pieces = tensors[name]
            written = sum(file.write(np.ascontiguousarray(piece, dtype="<f4").reshape(-1).view(np.uint8).data) for piece in pieces())
            if written != math.prod(shape) * FLOAT32_BYTES:
                raise ValueError(f"tensor {name} has {written // FLOAT32_BYTES} numbers, but its shape {list(shape)} needs {math.prod(shape)}")
