"""Hash values of all four algorithms and of every kind of extra key, as real vLLM computes them (R2.2 to R2.5, cases A16, A17, A19).

`block_hashes.json` was recorded from vLLM 0.27.0: its Request and get_request_block_hasher at block size 4, PYTHONHASHSEED=0.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engine.core.block_hash import BlockHasher, MultiModalFeature, generate_block_hash_extra_keys
from engine.core.request import Request
from engine.errors import InvalidInput

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "block_hashes.json").read_text())["hashes"]
PLACEHOLDERS = [0, 1, 9, 9, 9, 9, 9, 2, 3, 8, 8, 8]
"""The prompt of case A19: image P at tokens 2 to 6, image Q at tokens 9 to 11."""
IMAGES = (MultiModalFeature("P", 2, 5), MultiModalFeature("Q", 9, 3))


def embeddings(num_tokens: int) -> list[bytes]:
    """Row i is the two floats i and i + 0.5."""
    return [struct.pack("<2f", i, i + 0.5) for i in range(num_tokens)]


CASES: dict[str, tuple[list[int], dict[str, Any], list[int]]] = {
    "plain": (list(range(8)), {}, []),
    "lora": (list(range(8)), {"lora_name": "L"}, []),
    "lora+salt": (list(range(8)), {"lora_name": "L", "cache_salt": "s"}, []),
    "mm": (PLACEHOLDERS, {"mm_features": IMAGES}, []),
    "all": (PLACEHOLDERS, {"mm_features": IMAGES, "lora_name": "L", "cache_salt": "s", "prompt_embeds": embeddings(12)}, []),
    "embeds": ([0] * 6, {"prompt_embeds": embeddings(6)}, [1, 2, 3, 4, 5, 6]),
    "two items in the tail": ([0, 1, 2, 3, 9, 8, 8], {"mm_features": (MultiModalFeature("P", 4, 1), MultiModalFeature("Q", 5, 2))}, [7]),
    "one item in the tail": ([0, 1, 2, 3, 9, 8, 8], {"mm_features": (MultiModalFeature("Q", 5, 2),)}, [7]),
    "two items at once": ([0, 1, 2, 3, 9, 8, 8, 7], {"mm_features": (MultiModalFeature("P", 4, 1), MultiModalFeature("Q", 5, 2))}, []),
    "large": ([0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1], {}, []),
}


def hashes_of(case: str, algorithm: str, compat: str | None) -> list[str]:
    token_ids, options, outputs = CASES[case]
    request = Request("A", token_ids, block_hasher=BlockHasher(4, algorithm, compat=compat), **options)
    for token_id in outputs:
        request.append_output_token_ids(token_id)
    return [block_hash.hex() for block_hash in request.block_hashes]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
def test_hashes_are_those_of_vllm(case: str, algorithm: str) -> None:
    assert hashes_of(case, algorithm, "0.27.0") == RECORDED[algorithm][case]
    assert BlockHasher(4, algorithm).none_hash.hex() == RECORDED[algorithm]["NONE"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", ["plain", "mm", "embeds", "two items at once", "large"])
def test_by_default_they_differ_for_adapters_only(case: str, algorithm: str) -> None:
    assert hashes_of(case, algorithm, None) == RECORDED[algorithm][case]
    assert hashes_of("lora", algorithm, None)[0] != RECORDED[algorithm]["lora"][0]


def test_an_item_in_the_tail_is_seen_also_when_another_follows_it() -> None:
    """Two items lie in the block that the first output completes; 0.27.0 looks at the last one only, so that prompts with different first items share it."""
    one, two = "one item in the tail", "two items in the tail"
    assert RECORDED["sha256"][one] == RECORDED["sha256"][two]
    assert hashes_of(one, "sha256", None) == RECORDED["sha256"][one]
    assert hashes_of(two, "sha256", None) == RECORDED["sha256"]["two items at once"]


def test_the_order_of_extra_keys() -> None:
    """R2.4: adapter, items, salt, embeddings; the SHA-256 of the eight floats of block 0 was recorded from vLLM."""
    embeddings_hash = bytes.fromhex("c550add093344b2e34da9d0628e6598698b8ed797de8781c51d1240d84afa5f2")
    token_ids, options, _ = CASES["all"]
    request = Request("A", token_ids, **options)
    assert generate_block_hash_extra_keys(request, 0, 4, compat="0.27.0") == ("L", ("P", 2), "s", embeddings_hash)
    assert generate_block_hash_extra_keys(request, 0, 4) == (("lora", "L", 1), ("P", 2), "s", embeddings_hash)
    later = generate_block_hash_extra_keys(request, 4, 8, compat="0.27.0")
    assert later is not None
    assert later[:-1] == ("L", ("P", -2))


def test_an_image_separates_what_its_placeholders_do_not() -> None:
    """A19: another image P' in the same place shares nothing; the same P with another Q shares the two blocks before Q."""
    hasher = BlockHasher(4)

    def prompt(first: str, second: str) -> list[bytes]:
        features = (MultiModalFeature(first, 2, 5), MultiModalFeature(second, 9, 3))
        return Request("A", PLACEHOLDERS, mm_features=features, block_hasher=hasher).block_hashes

    one = prompt("P", "Q")
    assert not set(one) & set(prompt("P'", "Q"))
    other = prompt("P", "Q'")
    assert other[:2] == one[:2]
    assert other[2] != one[2]


def test_text_before_an_image_is_shared_between_different_images() -> None:
    """A19, last sentence."""
    hasher = BlockHasher(4)
    first, second = (
        Request("A", [0, 1, 2, 3, 9, 9, 9, 9], mm_features=(MultiModalFeature(name, 4, 4),), block_hasher=hasher).block_hashes for name in ("P", "Q")
    )
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_adapter_is_not_a_salt_and_has_an_id(algorithm: str) -> None:
    """A16, A17: in 0.27.0 the first block of adapter "X" equals that of the base model salted "X", and two adapters of one name share all."""

    def hashes(compat: str | None, **options: Any) -> list[bytes]:
        return Request("A", range(9), block_hasher=BlockHasher(4, algorithm, compat=compat), **options).block_hashes

    assert hashes("0.27.0", lora_name="X")[0] == hashes("0.27.0", cache_salt="X")[0]
    assert hashes("0.27.0", lora_name="X", lora_int_id=1) == hashes("0.27.0", lora_name="X", lora_int_id=2)
    assert not set(hashes(None, lora_name="X")) & set(hashes(None, cache_salt="X"))
    assert not set(hashes(None, lora_name="X", lora_int_id=1)) & set(hashes(None, lora_name="X", lora_int_id=2))
    assert hashes(None, cache_salt="X") == hashes("0.27.0", cache_salt="X")


def test_a_salt_stays_comparable_with_published_hashes() -> None:
    """R2.3: the salted golden value, in both modes."""
    for compat in (None, "0.27.0"):
        request = Request("A", range(4), cache_salt="s", block_hasher=BlockHasher(4, "sha256_cbor", compat=compat))
        assert request.block_hashes[0].hex() == "e870cd637a3a3fec7c07570a28aa13a8bfee7fef1b1fe03b3ea620fec753eb07"


@pytest.mark.parametrize(
    ("identifier", "offset", "length", "sentence"),
    [("", 0, 1, "has no identifier"), ("P", -1, 1, "begins at token -1"), ("P", 0, 0, "has 0 placeholder tokens")],
)
def test_impossible_items_are_refused(identifier: str, offset: int, length: int, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        MultiModalFeature(identifier, offset, length)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"mm_features": [MultiModalFeature("P", 0, 3), MultiModalFeature("Q", 2, 1)]},
            "'Q' of request 'A' begins at token 2, but the item before it ends at 3",
        ),
        ({"mm_features": [MultiModalFeature("P", 2, 1), MultiModalFeature("Q", 0, 1)]}, "'Q' of request 'A' begins at token 0"),
        ({"mm_features": [MultiModalFeature("P", 2, 3)]}, "covers tokens 2 to 4, but the prompt has 4"),
        ({"prompt_embeds": [b"1234"] * 3}, "3 prompt embeddings for 4 prompt tokens"),
        ({"prompt_embeds": [b"1234", b"1234", b"123", b"1234"]}, "at position 2"),
        ({"prompt_embeds": [b"", b"", b"", b""]}, "at position 0"),
        ({"prompt_embeds": [0.5, 0.5, 0.5, 0.5]}, "at position 0"),
    ],
)
def test_items_and_embeddings_that_do_not_fit_the_prompt_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Request("A", [0, 1, 2, 3], **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.hash_functions._xxh3_128_digest", None)
    for algorithm in ("xxhash", "xxhash_cbor"):
        with pytest.raises(InvalidInput, match="need the package xxhash"):
            BlockHasher(4, algorithm)


def test_another_release_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"only the mistakes of vLLM 0\.27\.0"):
        BlockHasher(4, compat="0.26.0")
