"""The last frame of a run in the field names of the conformance recordings, so that a run can be compared with vLLM's own states."""

from __future__ import annotations

from typing import Any

from engine.trace.frame import Frame, RequestState, Trace
from scenarios.expectations import Decode
from scenarios.hash_names import HashNames


def final_state(trace: Trace) -> dict[str, Any]:
    """`free`, `num_free`, `usage`, `ref`, `hash`, `hash_tokens`, `map` and `requests` of the last frame, all plain data; `extra_hashes` if there are any.

    Hashes have readable names (`HashNames`). Finished requests without blocks are left out. A run of the paper's engine also has its swap space: `cpu_free`,
    `cpu_ref` and `swapped`, and of each sequence `cpu_blocks` and `parent`.
    """
    frame = trace.frames[-1]
    names = HashNames(trace)
    many = _keys_with_many(trace)
    num_usable = sum(not b.is_null for b in frame.blocks)
    extra = {str(b.block_id): sorted(names(key) for key in b.block_hashes[1:]) for b in frame.blocks if len(b.block_hashes) > 1}
    return {
        "free": list(frame.free_queue),
        "num_free": len(frame.free_queue),
        "usage": round(1 - len(frame.free_queue) / num_usable, 4) if num_usable else 0.0,
        "ref": {str(b.block_id): b.ref_cnt for b in frame.blocks if b.ref_cnt and not b.is_null},
        "hash": {str(b.block_id): names(b.block_hashes[0]) for b in frame.blocks if b.block_hashes},
        "hash_tokens": {str(b.block_id): b.num_hash_tokens for b in frame.blocks if b.block_hashes},
        **({"extra_hashes": extra} if extra else {}),
        "map": {names(key): list(ids) if key in many else ids[0] for key, ids in frame.hash_map},
        **(_swap_space(frame) if frame.cpu_blocks else {}),
        "requests": {r.request_id: _request(r) for r in frame.requests if not r.status.startswith("FINISHED") or any(r.block_ids)},
    }


def outputs(trace: Trace, decode: Decode) -> dict[str, dict[str, Any]]:
    """Per request that arrived: the text and the token ids of its outputs, the positions that were forced, and its status."""
    found: dict[str, dict[str, Any]] = {}
    for request in trace.frames[-1].requests:
        token_ids = list(request.token_ids[request.num_prompt_tokens :])
        found[request.request_id] = {"text": decode(token_ids), "token_ids": token_ids, "forced_positions": list(request.forced), "status": request.status}
    return found


def _swap_space(frame: Frame) -> dict[str, Any]:
    return {
        "cpu_free": list(frame.cpu_free_queue),
        "cpu_ref": {str(b.block_id): b.ref_cnt for b in frame.cpu_blocks if b.ref_cnt},
        "swapped": list(frame.swapped),
    }


def _request(request: RequestState) -> dict[str, Any]:
    paper = {"cpu_blocks": list(request.cpu_block_ids)} if request.cpu_block_ids else {}
    return {
        "status": request.status,
        "num_tokens": len(request.token_ids),
        "computed": request.num_computed_tokens,
        "n_hashes": len(request.block_hashes),
        "blocks": [list(table) for table in request.block_ids],
        "cached": list(request.num_cached_block),
        **paper,
        **({"parent": request.parent_id} if request.parent_id is not None else {}),
    }


def _keys_with_many(trace: Trace) -> set[str]:
    """Keys under which a second block was registered since they came into the map: they stay lists, even when one block is left (R1.10)."""
    many: set[str] = set()
    last: Any = None
    for frame in trace.frames:
        if frame.hash_map != last:
            many = {key for key, ids in frame.hash_map if len(ids) > 1 or key in many}
        last = frame.hash_map
    return many
