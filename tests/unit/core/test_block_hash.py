"""Hashing (section 2): golden digests, chaining, extra keys, granularity."""

from __future__ import annotations

import hashlib
import pickle

import pytest

from engine.core.block_hash import (
    BlockHasher,
    BlockHashListWithBlockSize,
    format_key,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from engine.core.kv_events import external_block_hash
from engine.core.request import Request
from engine.errors import InvalidInput

GOLDEN_NONE_HASH = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
GOLDEN_FIRST = "8d4c7c828f1611f485f1ebfc2b19f0fe1c90d0a71d00cd90948a1fa5e8c9e91f"
GOLDEN_SECOND = "ed6fa5d37a067707ede9aff44aa2819ab639263ca4ca66e8d36d02ffac952d33"
GOLDEN_SALTED = "e870cd637a3a3fec7c07570a28aa13a8bfee7fef1b1fe03b3ea620fec753eb07"


@pytest.fixture
def hasher() -> BlockHasher:
    return BlockHasher(4, "sha256_cbor")


def test_golden_digests_of_vllm(hasher: BlockHasher) -> None:
    """R2.3, recorded from vLLM with PYTHONHASHSEED=0."""
    assert hasher.none_hash.hex() == GOLDEN_NONE_HASH
    first = hasher.hash_block_tokens(None, [0, 1, 2, 3])
    assert first.hex() == GOLDEN_FIRST
    assert external_block_hash(first) == 10703402261835016479
    assert hasher.hash_block_tokens(first, [4, 5, 6, 7]).hex() == GOLDEN_SECOND
    assert hasher.hash_block_tokens(None, [0, 1, 2, 3], ("s",)).hex() == GOLDEN_SALTED


def test_a_request_hashes_its_full_blocks_at_once(hasher: BlockHasher) -> None:
    """R2.5: full chunks of the prompt only, the tail when an output completes it."""
    request = Request("A", range(7), block_hasher=hasher)
    assert [block_hash.hex() for block_hash in request.block_hashes] == [GOLDEN_FIRST]
    request.append_output_token_ids(7)
    assert [block_hash.hex() for block_hash in request.block_hashes] == [GOLDEN_FIRST, GOLDEN_SECOND]
    request.append_output_token_ids([8, 9, 10, 11, 12])
    assert len(request.block_hashes) == 3


def test_salt_enters_the_first_block_only_and_separates_the_chain(hasher: BlockHasher) -> None:
    """R2.4 [T15]."""
    salted = Request("B", range(8), cache_salt="s", block_hasher=hasher)
    assert salted.block_hashes[0].hex() == GOLDEN_SALTED
    assert salted.block_hashes[1] == hasher.hash_block_tokens(salted.block_hashes[0], [4, 5, 6, 7])
    assert salted.block_hashes[1].hex() != GOLDEN_SECOND
    assert generate_block_hash_extra_keys(salted, 0, 4) == ("s",)
    assert generate_block_hash_extra_keys(salted, 4, 8) is None


def test_the_adapter_enters_every_block_before_the_salt(hasher: BlockHasher) -> None:
    """R2.4: the order of the extra keys."""
    request = Request("C", range(8), cache_salt="s", lora_name="L", lora_int_id=3, block_hasher=hasher)
    adapter = ("lora", "L", 3)
    assert generate_block_hash_extra_keys(request, 0, 4) == (adapter, "s")
    assert generate_block_hash_extra_keys(request, 4, 8) == (adapter,)
    first = hasher.hash_block_tokens(None, [0, 1, 2, 3], (adapter, "s"))
    assert request.block_hashes == [first, hasher.hash_block_tokens(first, [4, 5, 6, 7], (adapter,))]


def test_sha256_is_the_digest_of_the_pickle() -> None:
    """R2.2, computed here from its definition."""
    hasher = BlockHasher(4, "sha256")
    none_hash = hashlib.sha256(pickle.dumps("0", protocol=pickle.HIGHEST_PROTOCOL)).digest()
    expected = hashlib.sha256(pickle.dumps((none_hash, (0, 1, 2, 3), None), protocol=pickle.HIGHEST_PROTOCOL)).digest()
    assert hasher.none_hash == none_hash
    assert hasher.hash_block_tokens(None, [0, 1, 2, 3]) == expected


def test_without_a_seed_every_hasher_starts_elsewhere() -> None:
    """R2.3: 32 random bytes."""
    one, other = (BlockHasher(4, "sha256_cbor", seed=None) for _ in range(2))
    assert len(one.none_hash) == 32
    assert one.none_hash != other.none_hash


def test_the_group_id_stands_behind_the_hash_big_endian() -> None:
    """R1.10."""
    key = make_block_hash_with_group_id(b"\xaa" * 32, 258)
    assert key == b"\xaa" * 32 + b"\x00\x00\x01\x02"
    assert get_block_hash(key) == b"\xaa" * 32
    assert get_group_id(key) == 258
    assert format_key(key) == "aa" * 32 + ":258"


def test_a_coarse_block_has_the_hash_of_its_last_fine_block() -> None:
    """R2.7: number (i+1)*k - 1, nothing is hashed again; an incomplete coarse block has none."""
    fine = [bytes([i]) for i in range(7)]
    coarse = BlockHashListWithBlockSize(fine, 4, 8)
    assert list(coarse) == [fine[1], fine[3], fine[5]]
    assert coarse[-1] == fine[5]
    assert coarse[:2] == [fine[1], fine[3]]
    with pytest.raises(IndexError):
        coarse[3]
    with pytest.raises(InvalidInput, match="not a multiple"):
        BlockHashListWithBlockSize(fine, 4, 6)


@pytest.mark.parametrize(("size", "algorithm", "sentence"), [(0, "sha256", "at least 1 token"), (4, "md5", "choose one of sha256, sha256_cbor")])
def test_bad_settings_are_refused(size: int, algorithm: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        BlockHasher(size, algorithm)
