"""Reads a GGUF file: its fields and, piece by piece, the numbers of its tensors. Needs no torch.

The gguf package's own reader makes an object of every token, which takes more than ten seconds for a vocabulary of 262,144; here the whole header is read in a
fraction of one. Source: the GGUF specification, versions 2 and 3, little-endian. The unpacking itself is the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The specification's number of a value type -> struct's letter."""

DEFAULT_ALIGNMENT = 32
PIECE_ELEMENTS = 1 << 18
"""Numbers that are unpacked at a time: one megabyte, which stays in a processor's cache."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape`: rows first, as numpy and torch have it; `offset`, `num_bytes`: in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


@dataclass
class GGUFFile:
    """An open GGUF file; close it, or use it in a `with`. Raises ValueError for what is no GGUF file or is cut off, OSError from the disk."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: list[GGUFTensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        with self.path.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"its header is damaged ({error})") from error

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bytes.close()

    def pieces(self, tensor: GGUFTensor) -> Iterator[FloatArray]:
        """The tensor's numbers in order, flat float32 arrays of at most `PIECE_ELEMENTS`, each to be used before the next is asked for."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(tensor.type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        step = PIECE_ELEMENTS // block_elements * block_bytes
        for start in range(0, tensor.num_bytes, step):
            count = min(step, tensor.num_bytes - start)
            packed = np.frombuffer(self._bytes[tensor.offset + start : tensor.offset + start + count], dtype=np.uint8)
            # One row: the package unpacks rows in small groups, and every block stands for itself.
            yield dequantize(packed.reshape(1, -1), kind).reshape(-1).astype(np.float32, copy=False)

    def numbers(self, tensor: GGUFTensor) -> FloatArray:
        """The whole tensor, float32, in its shape."""
        return np.concatenate(list(self.pieces(tensor))).reshape(tensor.shape)

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ValueError("it does not begin with “GGUF”")
        self._at = 4
        version, num_tensors, num_fields = self._take("IQQ")
        if version not in (2, 3):
            raise ValueError(f"it is GGUF version {version}, and versions 2 and 3 can be read")
        for _ in range(num_fields):
            name = self._string()
            (kind,) = self._take("I")
            self.fields[name] = self._value(kind)
        found = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = int(self.fields.get("general.alignment", DEFAULT_ALIGNMENT))
        data = math.ceil(self._at / alignment) * alignment
        self.tensors = [GGUFTensor(name, shape, kind, data + offset, _num_bytes(name, shape, kind)) for name, shape, kind, offset in found]
        end = max((tensor.offset + tensor.num_bytes for tensor in self.tensors), default=0)
        if end > len(self._bytes):
            raise ValueError(f"it has {len(self._bytes)} bytes, but its tensors end at {end}")

    def _take(self, letters: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{letters}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{letters}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._take(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        of, length = self._take("IQ")
        if length > len(self._bytes):
            raise ValueError("its header is damaged (an array is longer than the file)")
        return list(self._take(f"{length}{SCALARS[of]}")) if of in SCALARS else [self._value(of) for _ in range(length)]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._take("I")
        dimensions = self._take(f"{num_dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(dimensions)), kind, offset


def _num_bytes(name: str, shape: tuple[int, ...], type_id: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(type_id)  # ValueError when the package does not know it
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} numbers, which are no whole blocks of {kind.name}")
    return int(math.prod(shape) // block_elements * block_bytes)
