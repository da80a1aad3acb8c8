"""Many blocks encoded at once hash to what one block after the other hashes to, bit for bit."""

from __future__ import annotations

import hashlib

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.block_cbor import ARRAY, BYTE_STRING, encode_blocks, encode_head
from engine.core.block_hash import BlockHasher
from engine.core.request import Request

EDGES = [edge + step for edge in (0, 24, 2**8, 2**16, 2**32, 2**64, 2**72, 2**80) for step in (-1, 0, 1) if edge + step >= 0]
SEPARATOR_LOOKALIKES = [0x49, 0xFFFFFFFFFFFFFFFF, 0x49FFFFFFFFFFFFFF, 0x4949494949494949, 2**72 - 1, (0x49 << 72) | (2**72 - 1), 2**144 - 1]
token_ids = st.lists(
    st.one_of(st.integers(0, 200_000), st.sampled_from(EDGES + SEPARATOR_LOOKALIKES), st.integers(0, 2**64 - 1), st.integers(0, 2**90)), min_size=1, max_size=60
)


@given(token_ids, st.integers(1, 30))
@example([0x49, 2**64 - 1] * 12, 2)
@example([2**72 - 1] * 12, 3)
@example(list(range(600)), 300)
def test_hashes_equal_the_definition(tokens: list[int], block_size: int) -> None:
    """R2.1 and R2.2 with cbor2 and hashlib alone."""
    expected = []
    parent = hashlib.sha256(cbor2.dumps("0", canonical=True)).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(cbor2.dumps((parent, tuple(tokens[start : start + block_size]), None), canonical=True)).digest()
        expected.append(parent)
    assert Request("A", tokens, block_hasher=BlockHasher(block_size, "sha256_cbor")).block_hashes == expected


@given(token_ids, st.integers(1, 9), st.sampled_from(["sha256_cbor", "xxhash_cbor"]), st.sampled_from([None, "s"]), st.sampled_from([None, "L"]))
def test_all_at_once_equals_one_after_the_other(tokens: list[int], block_size: int, algorithm: str, salt: str | None, lora: str | None) -> None:
    """Also with extra keys, and from a start value of 32 bytes before hashes of 16."""
    hasher = BlockHasher(block_size, algorithm, seed=None)
    at_once = Request("A", tokens, cache_salt=salt, lora_name=lora, block_hasher=hasher)
    one_by_one = Request("B", tokens[:1], cache_salt=salt, lora_name=lora, block_hasher=hasher)
    for token_id in tokens[1:]:
        one_by_one.append_output_token_ids(token_id)
    assert at_once.block_hashes == one_by_one.block_hashes
    in_two = Request("C", tokens[: len(tokens) // 2 + 1], cache_salt=salt, lora_name=lora, block_hasher=hasher)
    in_two.append_output_token_ids(tokens[len(tokens) // 2 + 1 :])
    assert in_two.block_hashes == at_once.block_hashes


@given(token_ids, st.integers(1, 12))
def test_pieces_are_what_the_encoder_writes_for_each_block(tokens: list[int], block_size: int) -> None:
    pieces = encode_blocks(tokens, block_size)
    blocks = [tokens[start : start + block_size] for start in range(0, len(tokens) - block_size + 1, block_size)]
    if pieces is None:
        assert max(tokens) >= 2**64
    else:
        assert [encode_head(ARRAY, block_size) + piece for piece in pieces] == [cbor2.dumps(block, canonical=True) for block in blocks]


def test_a_number_that_looks_like_the_separator_is_noticed() -> None:
    assert encode_blocks([1, 2**72 - 1, 2, 3], 2) is None


@pytest.mark.parametrize("length", [0, 1, 23, 24, 255, 256, 65535, 65536, 100_000])
def test_heads_are_those_of_the_encoder(length: int) -> None:
    assert cbor2.dumps(b"x" * length, canonical=True) == encode_head(BYTE_STRING, length) + b"x" * length
    assert cbor2.dumps([0] * length, canonical=True) == encode_head(ARRAY, length) + b"\x00" * length
