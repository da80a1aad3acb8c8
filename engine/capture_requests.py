"""The requests as frames show them, kept as a `SharedSequence` in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.capture_mirrors import OwnersMirror
from engine.capture_touched import touched_requests
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.trace.events import Event
from engine.trace.frame import RequestState
from engine.trace.shared_sequence import Absent, SharedSequence


class RequestsMirror:
    """States of all requests that ever arrived. `requests` and `forced` (forced positions per request) grow in other hands.

    Starts from the states in `last`, if given: those that are as they were stay the same objects.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        managers: Sequence[SingleTypeKVCacheManager],
        forced: Mapping[str, tuple[int, ...]],
        last: SharedSequence[RequestState] | None = None,
    ) -> None:
        self.sequence: SharedSequence[RequestState] = last if last is not None else SharedSequence()
        self._requests = requests
        self._managers = managers
        self._forced = forced
        self._arrival: dict[str, int] = {request_id: number for number, request_id in enumerate(requests)}
        self._recent: set[str] = set()

    def read_tables(self, null_block_id: int) -> OwnersMirror:
        """All block tables of all requests, read afresh."""
        owners = OwnersMirror(len(self._managers), null_block_id, self._arrival)
        for request_id in self._requests:
            for group_id, manager in enumerate(self._managers):
                owners.update(request_id, group_id, manager.req_to_blocks.get(request_id, ()))
        return owners

    def read_all(self, owners: OwnersMirror) -> None:
        """Read every request again."""
        self._read(self._requests, owners)

    def update(self, event: Event, owners: OwnersMirror) -> None:
        """Read again the requests that the event names, and those of the event before, whose progress may have been written down after it."""
        touched = set(touched_requests(event))
        if len(self._requests) != len(self._arrival):
            for request_id in [*self._requests][len(self._arrival) :]:
                self._arrival[request_id] = len(self._arrival)
                touched.add(request_id)
        recent, self._recent = self._recent, touched
        self._read(sorted(touched | recent, key=lambda r: self._arrival.get(r, -1)), owners)

    def _read(self, request_ids: Iterable[str], owners: OwnersMirror) -> None:
        changes: dict[int, RequestState | Absent] = {}
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            number = self._arrival[request_id]
            last = self.sequence[number] if number < len(self.sequence) else None
            state = self._state(request, owners, last)
            if state != last:
                changes[number] = state
        if changes:
            self.sequence = self.sequence.with_changes(changes)

    def _state(self, request: Request, owners: OwnersMirror, last: RequestState | None) -> RequestState:
        request_id = request.request_id
        token_ids = last.token_ids if last is not None else ()
        if len(token_ids) != len(request.all_token_ids):
            token_ids = tuple(request.all_token_ids)
        hashes = last.block_hashes if last is not None else ()
        if len(hashes) != len(request.block_hashes):  # like tokens, hashes are only ever added
            hashes = (*hashes, *[h.hex() for h in request.block_hashes[len(hashes) :]])
        return RequestState(
            request_id=request_id,
            status=request.status.name,
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=token_ids,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=owners.tables(request_id),
            block_hashes=hashes,
            num_cached_block=tuple([m.num_cached_block.get(request_id) for m in self._managers]),
            num_preemptions=request.num_preemptions,
            forced=self._forced.get(request_id, ()),
        )
