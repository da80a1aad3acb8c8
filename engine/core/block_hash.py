"""Chained block hashes: the names under which full blocks are cached (section 2 of the rules).

The hash of a block covers its own tokens and, through its parent's hash, every token before it; so equal hash means equal prefix, and one
lookup per block answers whether a prefix is cached. There is no process-wide start value here: a `BlockHasher` carries it.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, overload

import cbor2

from engine.errors import InvalidInput

BlockHash: TypeAlias = bytes
"""Hash of a block and everything before it."""
BlockHashWithGroupId: TypeAlias = bytes
"""A `BlockHash` followed by the KV-cache group id, 4 bytes, big endian (R1.10): the key of the prefix cache."""
ExtraKeys: TypeAlias = tuple[Any, ...]
"""What besides tokens tells two blocks apart (R2.4): LoRA name, cache salt."""


def sha256(value: object) -> BlockHash:
    """SHA-256 of the pickled value, highest protocol: 32 bytes, Python only. vLLM: sha256."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(value: object) -> BlockHash:
    """SHA-256 of the canonical CBOR form: 32 bytes, the same in every language. vLLM: sha256_cbor."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


HASH_FUNCTIONS: dict[str, Callable[[object], BlockHash]] = {"sha256": sha256, "sha256_cbor": sha256_cbor}
"""By the names of vLLM's `prefix_caching_hash_algo`."""


class HashableRequest(Protocol):
    """What the hasher reads of a request."""

    all_token_ids: list[int]
    block_hashes: list[BlockHash]
    lora_name: str | None
    cache_salt: str | None


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


def generate_block_hash_extra_keys(request: HashableRequest, start_token: int, end_token: int, *, compat: str | None = None) -> ExtraKeys | None:
    """Extra keys of the block that begins at `start_token`, in vLLM's order: LoRA name (every block), cache salt (first block only, R2.4).

    None when there are none. vLLM: generate_block_hash_extra_keys; here: no multimodal items and no prompt embeddings.
    """
    lora = (request.lora_name,) if request.lora_name else ()
    salt = (request.cache_salt,) if request.cache_salt and start_token == 0 else ()
    return lora + salt or None


class BlockHasher:
    """Hash function, start value and block size in one object, called by a request to hash what has become full.

    `hash_block_size` in tokens, `algorithm` a name of `HASH_FUNCTIONS`. `none_hash` stands in for the
    parent of a first block: H(`seed`), or 32 random bytes when `seed` is None.
    Raises InvalidInput for an unknown algorithm or a size below 1. vLLM: get_request_block_hasher and init_none_hash; here: no module-wide
    NONE_HASH, and the default seed "0" makes every run name its blocks alike.
    """

    def __init__(self, hash_block_size: int, algorithm: str = "sha256", seed: str | None = "0") -> None:
        if hash_block_size < 1:
            raise InvalidInput(f"hash_block_size is {hash_block_size}, but a block holds at least 1 token")
        if algorithm not in HASH_FUNCTIONS:
            raise InvalidInput(f"unknown hash algorithm {algorithm!r}: choose one of {', '.join(sorted(HASH_FUNCTIONS))}")
        self.hash_block_size = hash_block_size
        self.algorithm = algorithm
        self.hash_function = HASH_FUNCTIONS[algorithm]
        self.none_hash: BlockHash = secrets.token_bytes(32) if seed is None else self.hash_function(seed)

    def hash_block_tokens(self, parent_block_hash: BlockHash | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None) -> BlockHash:
        """H((parent, tokens, extra)) (R2.1); `parent_block_hash` None means the first block. vLLM: hash_block_tokens."""
        return self.hash_function((parent_block_hash or self.none_hash, tuple(token_ids), extra_keys))

    def __call__(self, request: HashableRequest) -> list[BlockHash]:
        """Hashes of the full blocks that `request.block_hashes` does not have yet (R2.5). Changes nothing."""
        size = self.hash_block_size
        start = len(request.block_hashes) * size
        token_ids = request.all_token_ids
        end = len(token_ids)
        if start + size > end:
            return []
        parent = request.block_hashes[-1] if request.block_hashes else self.none_hash
        function = self.hash_function
        has_extra_keys = bool(request.lora_name or request.cache_salt)
        new_hashes: list[BlockHash] = []
        for position in range(start, end - size + 1, size):
            extra_keys = generate_block_hash_extra_keys(request, position, position + size) if has_extra_keys else None
            parent = function((parent, tuple(token_ids[position : position + size]), extra_keys))
            new_hashes.append(parent)
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
