"""Reading GGUF and writing safetensors piece by piece, against the libraries that read and write them whole."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.models.gguf_file as module
from engine.models.gguf_file import GGUFFile
from engine.models.weights_file import write_float32


def test_fields_and_tensors_are_those_of_the_gguf_package(small_gguf: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(small_gguf)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    with GGUFFile(small_gguf) as file:
        assert file.fields == expected
        assert [tensor.name for tensor in file.tensors] == [tensor.name for tensor in reader.tensors]
        for ours, theirs in zip(file.tensors, reader.tensors, strict=True):
            assert np.array_equal(file.numbers(ours), theirs.data)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "F32"])
def test_pieces_are_what_the_gguf_package_unpacks_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small pieces, so that a tensor has several and a short last one."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize

    monkeypatch.setattr(module, "PIECE_ELEMENTS", 160)
    weights = np.random.default_rng(3).normal(size=(7, 64)).astype(np.float32)
    quantization = GGMLQuantizationType[kind]
    packed = quantize(weights, quantization)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first", np.ones(3, dtype=np.float32))
    writer.add_tensor("w", packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "one.gguf") as file:
        tensor = file.tensors[1]
        pieces = list(file.pieces(tensor))
        assert [piece.size for piece in pieces] == [160, 160, 128]
        assert np.array_equal(file.numbers(tensor), dequantize(packed, quantization))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"ZIP!" + data[4:], "does not begin with “GGUF”"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1, and versions 2 and 3 can be read"),
        (lambda data: data[:40], "its header is damaged"),
        (lambda data: data[:-100], "its tensors end at"),
    ],
)
def test_what_is_no_whole_gguf_file_is_refused(damage: Any, says: str, small_gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(damage(small_gguf.read_bytes()))
    with pytest.raises(ValueError, match=says):
        GGUFFile(broken)


def test_the_file_of_weights_has_the_bytes_of_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(5)
    arrays = {name: generator.normal(size=shape).astype(np.float32) for name, shape in {"b.w": (3, 5), "a": (7,), "ä": (1, 2, 3)}.items()}
    save_file(arrays, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    write_float32(tmp_path / "ours.safetensors", {name: (array.shape, lambda array=array: iter(np.array_split(array, 2))) for name, array in arrays.items()})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_pieces_that_do_not_fill_the_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor w has 2 numbers, but its shape \[3\] needs 3"):
        write_float32(tmp_path / "x.safetensors", {"w": ((3,), lambda: iter([np.ones(2, dtype=np.float32)]))})
