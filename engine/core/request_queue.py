"""The waiting requests, in the order in which they will be served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Iterator

from engine.core.request import Request
from engine.core.scheduler_config import SchedulingPolicy


class RequestQueue(ABC):
    """What the scheduler does with waiting requests (`_requests`, the next to be served first). vLLM: RequestQueue."""

    _requests: deque[Request] | list[Request]

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """A new request takes its place."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """A preempted request comes back; ahead of everybody where the order is that of arrival."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take the next to be served. Raises IndexError when there is none."""

    def peek_request(self) -> Request:
        """The next to be served, left where it is. Raises IndexError when there is none."""
        return self._requests[0]

    def remove_request(self, request: Request) -> None:
        """Take one out. Raises ValueError when it is not there."""
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        """In order of service."""
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class FCFSRequestQueue(RequestQueue):
    """First come, first served. vLLM: FCFSRequestQueue."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def prepend_request(self, request: Request) -> None:
        self._requests.appendleft(request)

    def pop_request(self) -> Request:
        return self._requests.popleft()


def priority_key(request: Request) -> tuple[int, float, str]:
    """Smallest first: priority, arrival, and the id so that ties are decided alike in every run."""
    return (request.priority, request.arrival_time, request.request_id)


class PriorityRequestQueue(RequestQueue):
    """Smallest priority first, then arrival; a preempted request gets no privilege. vLLM: PriorityRequestQueue."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add_request(self, request: Request) -> None:
        insort(self._requests, request, key=priority_key)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def pop_request(self) -> Request:
        return self._requests.pop(0)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The queue for this policy. vLLM: create_request_queue."""
    return PriorityRequestQueue() if policy is SchedulingPolicy.PRIORITY else FCFSRequestQueue()


def num_ahead(request: Request, waiting: RequestQueue, skipped_waiting: RequestQueue) -> int:
    """How many waiting requests will be served before `request`, which waits too. O(waiting): for recorders. vLLM: none."""
    line = [*skipped_waiting, *waiting]
    if isinstance(waiting, PriorityRequestQueue):
        line.sort(key=priority_key)
    return line.index(request)


def select_waiting_queue(waiting: RequestQueue, skipped_waiting: RequestQueue) -> RequestQueue:
    """Whose head is served next: those that a step passed over come first in order of arrival; by priority the better of the two heads (R7.3). At least one
    queue has somebody. vLLM: Scheduler._select_waiting_queue_for_scheduling."""
    if not len(skipped_waiting):
        return waiting
    if not len(waiting) or isinstance(waiting, FCFSRequestQueue):
        return skipped_waiting
    return min(waiting, skipped_waiting, key=lambda queue: priority_key(queue.peek_request()))
