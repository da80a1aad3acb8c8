"""Random operations on a bare block pool."""

from __future__ import annotations

from random import Random

from tests.conformance.compare import Json
from tests.conformance.random_config import weighted


def random_pool_scenario(random: Random, operations: int) -> Json:
    """Operations that mostly fit the state of the pool: blocks are freed as often as they were taken, and hashes go to blocks in use."""
    scenario: Json = {"mode": "pool", "num_blocks": random.choice([2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24])}
    if random.random() < 0.7:
        scenario["block_size"] = random.choice([1, 2, 4, 16])
    if random.random() < 0.1:
        scenario["enable_caching"] = False
    pool = _Pool(random, scenario["num_blocks"], scenario.get("enable_caching", True))
    scenario["ops"] = [pool.operation() for _ in range(operations)]
    return scenario


class _Pool:
    """The free queue, who is in use how often, and which blocks have hashes: as much as the choice of operations needs."""

    def __init__(self, random: Random, num_blocks: int, caching: bool) -> None:
        self.random = random
        self.num_blocks = num_blocks
        self.caching = caching
        self.queue = list(range(1, num_blocks))
        self.uses = dict.fromkeys(range(1, num_blocks), 0)
        self.labels: dict[int, list[str]] = {}
        self.names = [f"h{index}" for index in range(max(2, num_blocks // 2))]

    def operation(self) -> Json:
        used = [block for block, count in self.uses.items() if count]
        weights = {"get": 3.0, "free": 3.5, "hash": 4.0, "touch": 1.5, "lookup": 1.2, "evict": 0.6, "reset": 0.3}
        if not used:
            weights.update(free=0.0, hash=0.3, reset=0.5)
        if not self.queue:
            weights["get"] = 0.3
        op: Json = getattr(self, "_" + weighted(self.random, weights))(used)
        return op

    def _get(self, used: list[int]) -> Json:
        count = self.random.randint(1, max(1, min(4, len(self.queue))))
        if self.random.random() < 0.05:
            count = self.random.choice([0, len(self.queue), len(self.queue) + 1])
        if count <= len(self.queue):
            for block in self.queue[:count]:
                self.uses[block] += 1
                if self.caching:
                    self.labels.pop(block, None)
            del self.queue[:count]
        return {"op": "get", "n": count}

    def _free(self, used: list[int]) -> Json:
        ids = self.random.sample(used, self.random.randint(1, min(4, len(used))))
        if self.random.random() < 0.06:  # the same block twice in one call, as one that two requests share
            ids.append(self.random.choice(ids))
            if any(ids.count(block) > self.uses[block] for block in ids) and self.random.random() < 0.9:
                ids.pop()
        first, last = [], []
        for block in ids:
            self.uses[block] -= 1
            if self.uses[block] == 0:
                (last if block in self.labels or not self.caching else first).append(block)
        self.queue = first + self.queue + last
        return {"op": "free", "ids": ids}

    def _hash(self, used: list[int]) -> Json:
        fresh = [block for block in used if block not in self.labels]
        if not fresh or self.random.random() < 0.3:
            fresh = used or list(self.uses)
        block = self.random.choice(fresh)
        label = self.random.choice(self.names)
        self.labels.setdefault(block, []).append(label)
        op = {"op": "hash", "id": block, "label": label}
        return {**op, "tokens": self.random.randint(1, 16)} if self.random.random() < 0.2 else op

    def _touch(self, used: list[int]) -> Json:
        candidates = sorted({*used, *self.labels}) or [self.random.choice(list(self.uses))]
        ids = self.random.sample(candidates, self.random.randint(1, min(3, len(candidates))))
        for block in ids:
            if self.uses[block] == 0 and block in self.queue:
                self.queue.remove(block)
            self.uses[block] += 1
        return {"op": "touch", "ids": ids}

    def _lookup(self, used: list[int]) -> Json:
        return {"op": "lookup", "label": self.random.choice(self.names)}

    def _evict(self, used: list[int]) -> Json:
        candidates = sorted(self.labels) if self.labels and self.random.random() < 0.8 else list(self.uses)
        ids = self.random.sample(candidates, self.random.randint(1, min(3, len(candidates))))
        for block in ids:
            self.labels.pop(block, None)
        return {"op": "evict", "ids": ids}

    def _reset(self, used: list[int]) -> Json:
        if not used:
            self.labels.clear()
        elif self.random.random() < 0.5:  # give everything back first, so that it can succeed
            ids = [block for block in used for _ in range(self.uses[block])]
            for block in used:
                self.uses[block] = 0
                self.queue.append(block)
            return {"op": "free", "ids": ids}
        return {"op": "reset"}
