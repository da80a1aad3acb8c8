"""What besides its tokens tells a block from others: adapter, multimodal items, salt, prompt embeddings (R2.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from engine.core.compat import VLLM_0_27_0
from engine.errors import InvalidInput

ExtraKeys: TypeAlias = tuple[Any, ...]
"""Extra keys of one block, in vLLM's order (R2.4)."""


@dataclass(frozen=True)
class MultiModalFeature:
    """An image, a sound, ...: `identifier` names its content, its placeholders are the `length` tokens from `offset` on.

    All items share a few placeholder token ids, so the tokens alone do not tell which item they stand for. Raises InvalidInput for an empty identifier, a
    negative offset or a length below 1. vLLM: MultiModalFeatureSpec with its PlaceholderRange; here: what hashing needs of both.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not self.identifier:
            raise InvalidInput("a multimodal item has no identifier: name its content")
        if self.offset < 0:
            raise InvalidInput(f"multimodal item {self.identifier!r} begins at token {self.offset}, but tokens are counted from 0")
        if self.length < 1:
            raise InvalidInput(f"multimodal item {self.identifier!r} has {self.length} placeholder tokens, but it needs at least 1")


class HasExtraKeys(Protocol):
    """What of a request enters its hashes besides tokens."""

    lora_name: str | None
    lora_int_id: int
    cache_salt: str | None
    mm_features: tuple[MultiModalFeature, ...]
    prompt_embeds: Sequence[bytes] | None


def need_extra_keys(request: HasExtraKeys) -> bool:
    """Whether any block of `request` has extra keys. vLLM: need_extra_keys; here: prompt embeddings count as well."""
    return bool(request.lora_name or request.cache_salt or request.mm_features or request.prompt_embeds is not None)


def generate_block_hash_extra_keys(
    request: HasExtraKeys, start_token: int, end_token: int, *, compat: str | None = None, is_continued: bool = False
) -> ExtraKeys | None:
    """Extra keys of the block of tokens `start_token` to `end_token` (exclusive), None when there are none. Changes nothing.

    In this order (R2.4): the adapter, in every block; for each multimodal item that reaches into the block its identifier and its offset from the
    block's start, which may be negative; the salt, in the block at token 0 only, because chaining carries it on; SHA-256 of the prompt embeddings of
    the block's tokens, of which those behind the prompt have none.

    `is_continued`: earlier blocks of the request were hashed by an earlier call. Only `compat` "0.27.0" cares: then a block looks at the last item alone,
    and misses the first of two items in the block that the first outputs complete. There the adapter is also its bare name, which is taken for an equal
    salt (A16) and for another adapter of that name (A17).
    vLLM: generate_block_hash_extra_keys; here: adapters are ("lora", name, id), and each block looks at all items.
    """
    exact = compat == VLLM_0_27_0
    keys: list[Any] = []
    if request.lora_name:
        keys.append(request.lora_name if exact else ("lora", request.lora_name, request.lora_int_id))
    for feature in request.mm_features[-1:] if exact and is_continued else request.mm_features:
        if feature.offset >= end_token:
            break
        if feature.offset + feature.length > start_token:
            keys.append((feature.identifier, feature.offset - start_token))
    if request.cache_salt and start_token == 0:
        keys.append(request.cache_salt)
    if request.prompt_embeds is not None:
        keys.append(hashlib.sha256(b"".join(request.prompt_embeds[start_token:end_token])).digest())
    return tuple(keys) or None


def check_mm_features(request_id: str, mm_features: Sequence[MultiModalFeature], num_prompt_tokens: int) -> None:
    """Raises InvalidInput unless the items stand in order, apart from each other, inside the prompt."""
    end = 0
    for feature in mm_features:
        where = f"multimodal item {feature.identifier!r} of request {request_id!r}"
        if feature.offset < end:
            raise InvalidInput(f"{where} begins at token {feature.offset}, but the item before it ends at {end}: give items in order, without overlap")
        end = feature.offset + feature.length
        if end > num_prompt_tokens:
            raise InvalidInput(f"{where} covers tokens {feature.offset} to {end - 1}, but the prompt has {num_prompt_tokens}: items stand inside the prompt")


def check_prompt_embeds(request_id: str, prompt_embeds: Sequence[bytes], num_prompt_tokens: int) -> None:
    """Raises InvalidInput unless there is one row of bytes for each token of the prompt, all of one length."""
    if len(prompt_embeds) != num_prompt_tokens:
        raise InvalidInput(f"request {request_id!r} has {len(prompt_embeds)} prompt embeddings for {num_prompt_tokens} prompt tokens: give one row for each")
    for position, row in enumerate(prompt_embeds):
        if not isinstance(row, bytes) or not row or len(row) != len(prompt_embeds[0]):
            raise InvalidInput(
                f"request {request_id!r} has a prompt embedding at position {position} that is not a row of bytes as long as the first: give the raw "
                "little-endian floats of one token"
            )
