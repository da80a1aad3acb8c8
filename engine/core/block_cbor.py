"""CBOR of many blocks' tokens at once.

The hash of a block is the digest of CBOR's ``[parent, [token, …], extra keys or null]``. CBOR writes the elements of an array one after another, so
the piece for the tokens depends on nothing else, and the pieces of a whole prompt can be made by one call of the encoder: a separator is put before
each block, and the result is cut at the separators.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import cbor2

_SEPARATOR = b"\xff" * 9
_ENCODED_SEPARATOR: bytes = cbor2.dumps(_SEPARATOR, canonical=True)
ENCODED_NONE: bytes = cbor2.dumps(None, canonical=True)
BYTE_STRING = 2
ARRAY = 4


def encode_head(major_type: int, length: int) -> bytes:
    """Head of a `BYTE_STRING` or an `ARRAY` of `length` below 2**32, in its shortest form."""
    if length < 24:
        return bytes((major_type << 5 | length,))
    code, size = (24, 1) if length < 1 << 8 else (25, 2) if length < 1 << 16 else (26, 4)
    return bytes((major_type << 5 | code,)) + length.to_bytes(size, "big")


def encode_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes] | None:
    """Canonical CBOR of the tokens of each full block, without the array's head; what does not fill a block is left out. None, if some number of 2**64
    or more makes the cuts doubtful.

    The encoded separator is the byte 0x49 and nine bytes 0xff. A number below 2**64 takes a first byte that is not 0xff and at most eight more, so no
    nine of them stand in a row there; and a separator cannot begin inside another one. Larger numbers are byte strings, which may look like anything,
    but would only add cuts: with one cut for each block all is well.
    """
    iterator = iter(token_ids)
    separated = list(chain.from_iterable(zip(repeat(_SEPARATOR), *[iterator] * block_size, strict=False)))
    encoded: bytes = cbor2.dumps(separated, canonical=True)
    pieces = encoded.split(_ENCODED_SEPARATOR)
    return pieces[1:] if len(pieces) == len(token_ids) // block_size + 1 else None
