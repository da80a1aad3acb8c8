"""Chained block hashes: the names under which full blocks are cached (section 2 of the rules).

The hash of a block covers its own tokens and, through its parent's hash, every token before it; so equal hash means equal prefix, and one
lookup per block answers whether a prefix is cached. There is no process-wide start value here: a `BlockHasher` carries it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Protocol, TypeAlias, overload

import cbor2

from engine.core.block_cbor import ARRAY, BYTE_STRING, ENCODED_NONE, encode_blocks, encode_head
from engine.core.compat import check_compat
from engine.core.extra_keys import ExtraKeys, HasExtraKeys, MultiModalFeature, generate_block_hash_extra_keys, need_extra_keys
from engine.core.hash_functions import CBOR_DIGESTS, HASH_FUNCTIONS, Digest, get_hash_fn_by_name, sha256, sha256_cbor
from engine.errors import InvalidInput

__all__ = [
    "HASH_FUNCTIONS",
    "BlockHash",
    "BlockHashListWithBlockSize",
    "BlockHashWithGroupId",
    "BlockHasher",
    "ExtraKeys",
    "HashableRequest",
    "MultiModalFeature",
    "format_key",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "hashes_at_block_size",
    "make_block_hash_with_group_id",
    "sha256",
    "sha256_cbor",
]

BlockHash: TypeAlias = bytes
"""Hash of a block and everything before it."""
BlockHashWithGroupId: TypeAlias = bytes
"""A `BlockHash` followed by the KV-cache group id, 4 bytes, big endian (R1.10): the key of the prefix cache."""


class HashableRequest(HasExtraKeys, Protocol):
    """What the hasher reads of a request."""

    all_token_ids: list[int]
    block_hashes: list[BlockHash]


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The cache key of `block_hash` in one group. vLLM: make_block_hash_with_group_id."""
    return block_hash + group_id.to_bytes(4, "big")


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The hash part of a cache key. vLLM: get_block_hash."""
    return key[:-4]


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group part of a cache key. vLLM: get_group_id."""
    return int.from_bytes(key[-4:], "big")


def format_key(key: BlockHashWithGroupId) -> str:
    """A cache key as frames show it: ``<hex digest>:<group id>``."""
    return f"{key[:-4].hex()}:{get_group_id(key)}"


class BlockHasher:
    """Hash function, start value and block size in one object, called by a request to hash what has become full.

    `hash_block_size` in tokens, `algorithm` a name of `HASH_FUNCTIONS`. `none_hash` stands in for the parent of a first block: H(`seed`), or 32 random
    bytes when `seed` is None. With `compat` "0.27.0" extra keys are as ambiguous as in that release (A16, A17).
    Raises InvalidInput for an algorithm that is unknown or whose package is missing, and for a size below 1. vLLM: get_request_block_hasher and
    init_none_hash; here: no module-wide NONE_HASH, and the default seed "0" makes every run name its blocks alike.
    """

    def __init__(self, hash_block_size: int, algorithm: str = "sha256", seed: str | None = "0", *, compat: str | None = None) -> None:
        if hash_block_size < 1:
            raise InvalidInput(f"hash_block_size is {hash_block_size}, but a block holds at least 1 token")
        self.hash_block_size = hash_block_size
        self.algorithm = algorithm
        self.hash_function = get_hash_fn_by_name(algorithm)
        self.compat = check_compat(compat)
        self.none_hash: BlockHash = secrets.token_bytes(32) if seed is None else self.hash_function(seed)
        self._cbor_digest = CBOR_DIGESTS.get(algorithm)

    def hash_block_tokens(self, parent_block_hash: BlockHash | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None) -> BlockHash:
        """H((parent, tokens, extra)) (R2.1); `parent_block_hash` None means the first block. vLLM: hash_block_tokens."""
        return self.hash_function((parent_block_hash or self.none_hash, tuple(token_ids), extra_keys))

    def __call__(self, request: HashableRequest) -> list[BlockHash]:
        """Hashes of the full blocks that `request.block_hashes` does not have yet (R2.5). Changes nothing."""
        size = self.hash_block_size
        block_hashes = request.block_hashes
        start = len(block_hashes) * size
        token_ids = request.all_token_ids
        num_tokens = len(token_ids) - start
        if num_tokens < size:
            return []
        num_blocks = num_tokens // size
        parent = block_hashes[-1] if start else self.none_hash
        extra_keys: Sequence[ExtraKeys | None] | None = None
        if need_extra_keys(request):
            extra_keys = [
                generate_block_hash_extra_keys(request, position, position + size, compat=self.compat, is_continued=start > 0)
                for position in range(start, start + num_blocks * size, size)
            ]
        if num_blocks > 1 and self._cbor_digest is not None:
            encoded = encode_blocks(token_ids[start:] if start else token_ids, size)
            if encoded is not None:
                return self._hash_encoded(self._cbor_digest, parent, encoded, extra_keys)
        function = self.hash_function
        new_hashes: list[BlockHash] = []
        for position, keys in zip(range(start, start + num_blocks * size, size), extra_keys or repeat(None), strict=False):
            parent = function((parent, tuple(token_ids[position : position + size]), keys))
            new_hashes.append(parent)
        return new_hashes

    def _hash_encoded(self, digest: Digest, parent: BlockHash, blocks: list[bytes], extra_keys: Sequence[ExtraKeys | None] | None) -> list[BlockHash]:
        """The chain from `parent` over blocks whose tokens are encoded; byte for byte what hash_block_tokens hashes."""
        before_tokens = encode_head(ARRAY, self.hash_block_size)
        new_hashes: list[BlockHash] = []
        append = new_hashes.append
        array_of_three = encode_head(ARRAY, 3)
        parent_heads = chain([array_of_three + encode_head(BYTE_STRING, len(parent))], repeat(array_of_three + encode_head(BYTE_STRING, len(digest(b"")))))
        tails = repeat(ENCODED_NONE) if extra_keys is None else (cbor2.dumps(keys, canonical=True) for keys in extra_keys)
        for parent_head, block, tail in zip(parent_heads, blocks, tails, strict=False):
            parent = digest(parent_head + parent + before_tokens + block + tail)
            append(parent)
        return new_hashes


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """A request's fine hashes seen at a coarser block size: coarse block i has the hash of its last fine block, nothing is hashed again (R2.7).

    Raises InvalidInput unless `target_block_size` is a multiple of `hash_block_size`. vLLM: BlockHashListWithBlockSize.
    """

    def __init__(self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int) -> None:
        if target_block_size % hash_block_size:
            raise InvalidInput(f"block size {target_block_size} is not a multiple of the hash block size {hash_block_size}")
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(index)
        return self.block_hashes[(position + 1) * self.scale_factor - 1]

    def __iter__(self) -> Iterator[BlockHash]:
        return (self[i] for i in range(len(self)))


def hashes_at_block_size(block_hashes: Sequence[BlockHash], hash_block_size: int, block_size: int) -> Sequence[BlockHash]:
    """`block_hashes` as seen by a group of `block_size`: the list itself when the sizes are equal."""
    if hash_block_size == block_size:
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)
