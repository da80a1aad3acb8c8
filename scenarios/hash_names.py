"""Readable names for hashes, as in the conformance recordings: ``A@8`` is the hash of the first 8 tokens of the first request that had this prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.trace.frame import Frame, Trace


class HashNames:
    """Names are learnt frame by frame, from all requests in order of arrival. With several groups a key's name ends with its group: ``A@8/g1``."""

    def __init__(self, trace: Trace, frames: Sequence[Frame] | None = None) -> None:
        self._names: dict[str, str] = {}
        frames = trace.frames if frames is None else frames
        groups = trace.header.config.get("kv_cache_groups")
        self._several_groups = len(groups) > 1 if groups else any(len(r.block_ids) > 1 for r in frames[-1].requests)
        hash_block_size = trace.header.config.get("hash_block_size") or len(trace.frames[0].blocks[0].token_ids)
        last: Any = None
        for frame in frames:
            if frame.requests is not last:
                self._learn(frame, hash_block_size)
            last = frame.requests

    def _learn(self, frame: Frame, hash_block_size: int) -> None:
        for request in frame.requests:
            for index, digest in enumerate(request.block_hashes):
                self._names.setdefault(digest, f"{request.request_id}@{(index + 1) * hash_block_size}")

    def __call__(self, key: str) -> str:
        """The name of a cache key; a hash that no request has is shown by its first 8 hex digits."""
        digest, _, group_id = key.partition(":")
        name = self._names.get(digest, digest[:8])
        return f"{name}/g{group_id}" if self._several_groups else name
