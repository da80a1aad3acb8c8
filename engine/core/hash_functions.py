"""The four hash functions of the prefix cache, by vLLM's names (R2.2).

Each is a digest of a serialised value: pickle, which only Python reads, or canonical CBOR, which is the same in every language; SHA-256, or the 128-bit
XXH3, which is faster and not meant to withstand an attacker.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import TypeAlias

import cbor2

from engine.errors import InvalidInput

Digest: TypeAlias = Callable[[bytes], bytes]

_xxh3_128_digest: Digest | None
try:
    import xxhash as xxhash_package
except ImportError:  # an optional package
    _xxh3_128_digest = None
else:
    _xxh3_128_digest = xxhash_package.xxh3_128_digest


def sha256_digest(data: bytes) -> bytes:
    """SHA-256: 32 bytes."""
    return hashlib.sha256(data).digest()


def xxh3_128_digest(data: bytes) -> bytes:
    """128-bit XXH3 with seed 0, big endian: 16 bytes. Raises InvalidInput when the package is missing."""
    if _xxh3_128_digest is None:
        raise InvalidInput(
            "the hash algorithms xxhash and xxhash_cbor need the package xxhash: install it (pip install xxhash) or choose sha256 or sha256_cbor"
        )
    return _xxh3_128_digest(data)


def sha256(value: object) -> bytes:
    """SHA-256 of the pickled value, highest protocol: 32 bytes, Python only. vLLM: sha256."""
    return sha256_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def sha256_cbor(value: object) -> bytes:
    """SHA-256 of the canonical CBOR form: 32 bytes, the same in every language. vLLM: sha256_cbor."""
    return sha256_digest(cbor2.dumps(value, canonical=True))


def xxhash(value: object) -> bytes:
    """XXH3 of the pickled value, highest protocol: 16 bytes, Python only. vLLM: xxhash."""
    return xxh3_128_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def xxhash_cbor(value: object) -> bytes:
    """XXH3 of the canonical CBOR form: 16 bytes, the same in every language. vLLM: xxhash_cbor."""
    return xxh3_128_digest(cbor2.dumps(value, canonical=True))


HASH_FUNCTIONS: dict[str, Callable[[object], bytes]] = {"sha256": sha256, "sha256_cbor": sha256_cbor, "xxhash": xxhash, "xxhash_cbor": xxhash_cbor}
"""By the names of vLLM's `prefix_caching_hash_algo`."""

CBOR_DIGESTS: dict[str, Digest] = {"sha256_cbor": sha256_digest, "xxhash_cbor": xxh3_128_digest}
"""The digest alone, for the algorithms whose serialised form can be put together from parts."""


def get_hash_fn_by_name(name: str) -> Callable[[object], bytes]:
    """The hash function called `name`. Raises InvalidInput for an unknown one, and for one whose package is missing. vLLM: get_hash_fn_by_name; here: a
    missing package is told at once, not at the first block."""
    if name not in HASH_FUNCTIONS:
        raise InvalidInput(f"unknown hash algorithm {name!r}: choose one of {', '.join(sorted(HASH_FUNCTIONS))}")
    if name.startswith("xxhash"):
        xxh3_128_digest(b"")
    return HASH_FUNCTIONS[name]
