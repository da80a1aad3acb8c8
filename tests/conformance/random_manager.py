"""Random operations on the KV-cache manager, chosen with a light model of each request.

The model guesses hits and refusals; it may be wrong, and then an operation is refused or fails, which is compared as well. What it must achieve is that
most operations fit the state of their request, so that runs go deep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.conformance.compare import Json
from tests.conformance.random_config import align_group, block_size_of, blocks_of_group, hash_block_size, scheduler_block_size, weighted
from tests.conformance.random_prompts import Prompts


@dataclass
class Guess:
    """What a request's state is believed to be."""

    name: str
    tokens: list[int]
    prompt: int
    key: tuple[str | None, str | None]
    status: str = "waiting"  # or running, finished
    computed: int = 0
    pending: int = 0
    shared: int = 0  # blocks held together with other requests
    uncertain: bool = False
    refused: bool = False  # since the last release of blocks

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class ManagerOperations:
    """Draws the operations of one scenario in manager mode."""

    random: Random
    scenario: Json
    prompts: Prompts
    requests: list[Guess] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)  # registered prefixes, and the step in which they were
    step: int = 0

    def __post_init__(self) -> None:
        self.groups: list[Json] = self.scenario.get("groups", [{"type": "full"}])
        self.sizes = [block_size_of(group, self.scenario) for group in self.groups]
        self.align = align_group(self.scenario)
        self.hash_size = hash_block_size(self.scenario)
        self.caching: bool = self.scenario.get("enable_caching", True)
        self.most_alive = self.random.choice([2, 3, 3, 4, 6])
        self.has_mamba = any(group["type"] == "mamba" for group in self.groups)
        self.chunky = 0.85 if self.align is not None else self.random.choice([0.1, 0.4, 0.7])
        self.odd = 0.3 if self.random.random() < 0.06 else 0.004
        self.drafts = self.random.random() < (0.7 if any(group["type"] == "rswa" for group in self.groups) else 0.2)
        self.plan: list[Callable[[], Json]] = []  # what comes next whatever happens
        self.echoes = self.random.choice([0.2, 0.6, 0.95])  # how often a sampled token is the one with which another sequence goes on
        fine = self.align is not None and len(self.groups) > 1 and self.coarse > self.hash_size
        self.unit = self.sizes[0] if len(self.groups) == 1 else (self.hash_size if fine else scheduler_block_size(self.scenario))

    @property
    def coarse(self) -> int:
        """Block size of the align group, else of the first."""
        return self.sizes[self.groups.index(self.align)] if self.align is not None else self.sizes[0]

    # ------------------------------------------------------------------ what is believed
    def held(self, request: Guess, length: int) -> int:
        pairs = zip(self.groups, self.sizes, strict=True)
        return sum(blocks_of_group(group, size, length, request.computed) for group, size in pairs) - request.shared

    def free(self) -> int:
        running = [request for request in self.requests if request.status == "running"]
        return int(self.scenario["num_blocks"]) - 1 - sum(self.held(request, len(request.tokens)) for request in running)

    def hit(self, request: Guess) -> int:
        """The longest registered prefix that leaves a token to compute."""
        last = (len(request.tokens) - 1) // self.unit * self.unit
        for length in range(last, 0, -self.unit):
            if (request.key, *request.tokens[:length]) in self.known:
                return max(0, length - self.unit) if self.scenario.get("use_eagle") else length
        return 0

    def register(self, request: Guess, end: int) -> None:
        if not self.caching:
            return
        if self.align is None:
            lengths = range(self.unit, end + 1, self.unit)
        else:
            tail = request.prompt // self.hash_size * self.hash_size
            lengths = range(end, end + 1) if end % self.coarse == 0 or end == tail else range(0)
        for length in lengths:
            self.known.setdefault((request.key, *request.tokens[:length]), self.step)

    # ------------------------------------------------------------------ choice
    def operation(self) -> Json:
        random = self.random
        if self.plan:
            return self.plan.pop(0)()
        alive = [request for request in self.requests if request.status != "finished"]
        if random.random() < self.odd and self.requests:
            return self.oddity(random.choice(self.requests))
        weights = {"add": 0.0, "request": 5.0, "step": 1.3 if self.has_mamba else 0.15, "copies": 0.9 if self.align else 0.04, "evict": 0.1, "reset": 0.1}
        if not alive:
            return self.add() if random.random() < 0.8 or not self.requests else {"op": "reset"}
        if len(alive) < self.most_alive:
            weights["add"] = 1.2 if len(alive) > 1 else 2.5
        kind = weighted(random, weights)
        if kind == "add":
            return self.add()
        if kind == "step":
            self.step += 1
            return {"op": "step"}
        if kind == "copies":
            return {"op": "copies", "release": random.random() < 0.5} if random.random() < 0.15 else {"op": "copies"}
        if kind == "evict":
            return {"op": "evict", "ids": [random.randrange(1, self.scenario["num_blocks"]) for _ in range(random.choice([1, 1, 2, 4]))]}
        if kind == "reset":
            if all(request.status != "running" for request in alive):
                self.known.clear()
            elif random.random() < 0.6:
                return self.release(random.choice([request for request in alive if request.status == "running"]))
            return {"op": "reset"}
        chosen = random.choice(alive)
        running = [request for request in alive if request.status == "running"]
        if chosen.refused and running and random.random() < 0.85:
            chosen = random.choice(running)
            if random.random() < 0.3:
                return self.release(chosen)
        return self.act(chosen)

    def add(self) -> Json:
        earlier = [request.tokens for request in self.requests]
        op, tokens = self.prompts.operation(f"R{len(self.requests)}", earlier)
        self.requests.append(Guess(op["id"], tokens, len(tokens), (op.get("salt"), op.get("lora"))))
        return op

    def add_prompt(self, tokens: list[int]) -> Json:
        self.requests.append(Guess(f"R{len(self.requests)}", list(tokens), len(tokens), (None, None)))
        return {"op": "add", "id": self.requests[-1].name, "tokens": tokens}

    def act(self, request: Guess) -> Json:
        random = self.random
        if request.status == "waiting":
            hopeless = request.refused and not any(other.status == "running" for other in self.requests)
            kind = weighted(random, {"start": 1.0, "lookup": 0.4, "release": 4.0} if hopeless else {"start": 6.0, "lookup": 0.7, "release": 0.3})
            if kind == "lookup":
                return {"op": "lookup", "id": request.name}
            return self.start(request) if kind == "start" else self.release(request)
        if request.pending:
            if request.uncertain and random.random() < 0.5:
                return self.release(request)
            kind = weighted(random, {"done": 9.0, "release": 0.6, "common": 0.2})
            if kind == "done":
                return self.done(request)
            return self.release(request) if kind == "release" else {"op": "common", "id": request.name}
        kind = weighted(random, {"run": 7.0, "release": 1.4, "common": 0.25, "cache": 0.25, "skip": 0.2, "lookup": 0.05})
        if kind == "run":
            return self.run(request)
        if kind == "release":
            return self.release(request)
        if kind == "cache":
            return {"op": "cache", "id": request.name, "n": random.choice([request.computed, request.computed, random.randint(0, request.computed)])}
        if kind == "skip":
            return {"op": "skip", "id": request.name, "n": random.choice([request.computed, random.randint(0, request.computed)])}
        return {"op": kind, "id": request.name}

    # ------------------------------------------------------------------ operations on one request
    def chunk_end(self, request: Guess, begin: int) -> int:
        """Where the next chunk ends: anywhere, or where align mode wants it."""
        end = len(request.tokens)
        if begin >= end - 1:
            return end
        if self.align is None or self.random.random() < 0.06:
            return self.random.randint(begin + 1, end)
        block = self.coarse
        tail = request.prompt // self.hash_size * self.hash_size
        last = end // block * block
        stops = [stop for stop in range((begin // block + 1) * block, last + 1, block) if stop < end]
        if begin < tail < end and (not stops or stops[-1] <= begin or self.random.random() < 0.5):
            return tail
        if begin % block and stops:
            return stops[0]
        return self.random.choice([stops[-1], stops[-1], *stops]) if stops else end

    def start(self, request: Guess) -> Json:
        random = self.random
        op: Json = {"op": "start", "id": request.name}
        hit = self.hit(request)
        whole = len(request.tokens) - hit
        new = whole
        if random.random() < self.chunky and whole > 1:
            new = self.chunk_end(request, hit) - hit
            if new != whole or random.random() < 0.2:
                op["new"] = new
        if random.random() < 0.06:
            op["lookahead"] = random.choice([1, 2, 4])
        if random.random() < 0.2:
            op["full_fit"] = False
        if random.random() < (0.3 if "watermark" in self.scenario else 0.05):
            op["has_scheduled"] = random.random() < 0.5
        if any(group["type"] == "cross" for group in self.groups) and random.random() < 0.6:
            op["encoder"] = random.randint(1, 3 * max(self.sizes))
        registered = self.known.get((request.key, *request.tokens[:hit]))
        if self.has_mamba and hit and registered == self.step:
            return op  # hits on this step's own states are put off
        request.computed = hit
        others = [other for other in self.requests if other.status == "running" and other.key == request.key and other.tokens[:hit] == request.tokens[:hit]]
        if others:
            pairs = zip(self.groups, self.sizes, strict=True)
            request.shared = sum(hit // size for group, size in pairs if group["type"] in ("full", "mla", "rswa"))
        need = self.held(request, len(request.tokens) if op.get("full_fit", True) else hit + new)
        slack = self.free() - need
        if op.get("has_scheduled", any(other.status == "running" for other in self.requests)):
            slack -= int(self.scenario.get("watermark", 0) * self.scenario["num_blocks"])
        if slack < 0 and random.random() < (0.95 if slack < -1 else 0.6):
            request.computed = request.shared = 0
            request.refused = True
            return op
        request.uncertain = -2 <= slack <= 1
        request.status, request.pending = "running", new
        self.register(request, min(hit + new, len(request.tokens)))
        return op

    def run(self, request: Guess) -> Json:
        random = self.random
        if request.left == 1 and random.random() < 0.6:
            token = self.next_token(request)
            request.computed += 1
            self.register(request, request.computed)
            return {"op": "decode", "id": request.name, "token": token}
        op: Json = {"op": "run", "id": request.name}
        new = request.left
        if new > 1 and random.random() < self.chunky:
            new = self.chunk_end(request, request.computed) - request.computed
            if new != request.left:
                op["new"] = new
        elif self.drafts and random.random() < 0.5:
            op["new"] = new = new + random.choice([1, 2, 3])
        elif random.random() < 0.3:
            op["new"] = new
        if random.random() < 0.06:
            op["lookahead"] = random.choice([1, 2, 4])
        request.pending = new
        self.register(request, min(request.computed + new, len(request.tokens)))
        return op

    def done(self, request: Guess, at_least: int = 1) -> Json:
        op: Json = {"op": "done", "id": request.name}
        request.computed += request.pending
        request.pending = 0
        request.uncertain = False
        missing = request.computed + 1 - len(request.tokens)
        if missing > 0:
            count = missing if self.random.random() < (0.6 if self.echoes > 0.9 else 0.93) else missing + self.random.choice([1, 2, 4])
            op["tokens"] = [self.next_token(request) for _ in range(max(count, at_least))]
        return op

    def release(self, request: Guess) -> Json:
        return self.give_back(request, "preempt" if self.random.random() < (0.15 if request.status == "waiting" else 0.5) else "free")

    def give_back(self, request: Guess, kind: str) -> Json:
        request.status = "waiting" if kind == "preempt" else "finished"
        request.computed = request.pending = request.shared = 0
        request.uncertain = False
        for other in self.requests:
            other.refused = False
        return {"op": kind, "id": request.name}

    def oddity(self, request: Guess) -> Json:
        """Something that does not fit: most of these fail."""
        kind = self.random.choice(["start", "run", "done", "decode", "lookup", "common", "free", "skip", "cache"])
        op: Json = {"op": kind, "id": request.name}
        if kind == "decode":
            op["token"] = self.random.randrange(10)
        if kind in ("skip", "cache"):
            op["n"] = self.random.randint(0, len(request.tokens))
        return op

    def next_token(self, request: Guess) -> int:
        """A sampled token, appended to the request."""
        length = len(request.tokens)
        sequences = [*self.prompts.stems, *(other.tokens for other in self.requests if other is not request)]
        longer = [tokens for tokens in sequences if len(tokens) > length and tokens[:length] == request.tokens]
        token = self.random.choice(longer)[length] if longer and self.random.random() < self.echoes else self.random.randrange(10)
        request.tokens.append(token)
        return token
