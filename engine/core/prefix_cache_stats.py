"""How often the prefix cache helped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Tokens asked for and tokens found, at admission; requests that resume after a preemption apart, because they find their own blocks (A25).
    `reset`: whether the cache was reset meanwhile. vLLM: PrefixCacheStats."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one admission of a request of `num_tokens` tokens, `num_hits` of which were cached."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
