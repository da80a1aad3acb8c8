"""Public bug reports about KV-cache managers, retold as scenarios with what must come out of them.

cases_pool.json, cases_groups.json, cases_events.json hold them by theme. An entry says: `case` (which report), `title`, `scenario` (conformance
format), `expected` (the right result) and, where vLLM 0.27.0 itself does it wrongly, `compat_expected` (what it does instead). `source` tells whether
`expected` was seen on real vLLM ("oracle") or follows from the rules ("rules"); `compat_expected` was always seen there. An expectation is one of

- ``step, path, value``: in this step of the output this field has this value (of an error only its presence counts);
- ``step, path, absent``: it does not exist;
- ``step, no_event: [type, hash, group]``: this step reports no such event;
- ``step, chain: {hash, group, tokens}``: from the events up to this step a listener can follow the parents of `hash` back to the first token and
  gets these tokens.

Step 0 is the fresh engine, step n the n-th operation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

Json: TypeAlias = dict[str, Any]
HERE = Path(__file__).parent
FILES = ("cases_pool.json", "cases_groups.json", "cases_events.json")
COMPAT = "0.27.0"


class Case(NamedTuple):
    """One retold report. `compat_expected` None: real vLLM does what `expected` says."""

    case: str
    title: str
    scenario: Json
    source: str
    expected: list[Json]
    compat_expected: list[Json] | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.case} {self.title}"

    @property
    def seen_on_vllm(self) -> list[Json]:
        """What real vLLM 0.27.0 does."""
        return self.expected if self.compat_expected is None else self.compat_expected


# ---------------------------------------------------------------------- checking
def _field(step: Json, path: list[str | int]) -> tuple[bool, Any]:
    """Whether the field is there, and its value."""
    found: Any = step
    for key in path:
        try:
            found = found[int(key)] if isinstance(found, list) else found[str(key)]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, bool(found) if path[-1] == "error" else found


def _chain(steps: list[Json], block_hash: str, group: int) -> list[int] | str:
    """The tokens behind `block_hash` as a listener puts them together, or why it cannot."""
    known: dict[str, tuple[str | None, list[int]]] = {}
    for step in steps:
        for event in step["state"].get("events", []):
            if event.get("group") != group:
                continue
            if event["type"] == "BlockRemoved":
                for removed in event["hashes"]:
                    known.pop(removed, None)
                continue
            parent, hashes, tokens = event["parent"], event["hashes"], event["tokens"]
            if parent is not None and parent not in known:
                return f"{hashes} follow {parent}, which nobody announced"
            for number, stored in enumerate(hashes):
                share = len(tokens) // len(hashes)
                known[stored] = (parent, tokens[number * share : (number + 1) * share])
                parent = stored
    tokens = []
    current: str | None = block_hash
    while current is not None:
        if current not in known:
            return f"{current} was not announced"
        current, part = known[current]
        tokens = part + tokens
    return tokens


def _check(steps: list[Json], expectation: Json) -> tuple[str, Any, Any]:
    """What is looked at, what is expected there, what is found."""
    number = expectation["step"]
    step = steps[number]
    if "no_event" in expectation:
        kind, block_hash, group = expectation["no_event"]
        found = [e for e in step["state"].get("events", []) if e["type"] == kind and e.get("group") == group and block_hash in e["hashes"]]
        return f"state.events: {kind} of {block_hash} in group {group}", [], found
    if "chain" in expectation:
        chain = expectation["chain"]
        return f"chain of {chain['hash']} in group {chain['group']}", chain["tokens"], _chain(steps[: number + 1], chain["hash"], chain["group"])
    exists, value = _field(step, expectation["path"])
    path = ".".join(map(str, expectation["path"]))
    if expectation.get("absent"):
        return path, "no such field", value if exists else "no such field"
    return path, expectation["value"], value if exists else "no such field"


def differences(name: str, steps: list[Json], expected: list[Json]) -> list[str]:
    """One line per expectation that the output `steps` does not meet."""
    steps = json.loads(json.dumps(steps))  # as it would be read from a file: keys are text
    if steps[-1]["op"] == "BUILD":
        return [f"{name}: cannot be built: {steps[-1].get('error')}"]
    lines = []
    for expectation in expected:
        what, wanted, found = _check(steps, expectation)
        if found != wanted:
            number = expectation["step"]
            lines.append(f"{name}, step {number} {json.dumps(steps[number]['op'])}, {what}: expected {json.dumps(wanted)}, got {json.dumps(found)}")
    return lines


# ---------------------------------------------------------------------- A31
NUM_SESSIONS = 3


def chat_sessions(num_blocks: int, retention_interval: int | None, hits: list[list[int]]) -> tuple[Json, list[Json]]:
    """Three chats take turns on full attention plus a window of 8 (blocks of 4): 24 tokens of prompt, prefilled in chunks of 8, and 4 decodes; then 4 new
    tokens of the user each round. `hits`: per round and session the tokens that the prompt finds. Returns the scenario and its expectations."""
    ops: list[Json] = []
    expected: list[Json] = []
    history = [list(range(1000 * session, 1000 * session + 24)) for session in range(NUM_SESSIONS)]
    for round_number, round_hits in enumerate(hits, start=1):
        for session, hit in enumerate(round_hits):
            request_id = f"S{session}R{round_number}"
            prompt = history[session]
            answer = [10000 + 1000 * session + 100 * round_number + i for i in range(5)]
            ops += [{"op": "add", "id": request_id, "tokens": prompt}, {"op": "step"}]
            for position in range(hit, len(prompt), 8):
                is_last = position + 8 >= len(prompt)
                ops.append({"op": "start" if position == hit else "run", "id": request_id, "new": min(8, len(prompt) - position)})
                if position == hit:
                    expected.append({"step": len(ops), "path": ["result", "hit_tokens"], "value": hit})
                    expected.append({"step": len(ops), "path": ["result", "scheduled"], "value": min(8, len(prompt) - hit)})
                ops.append({"op": "done", "id": request_id, "tokens": answer[:1] if is_last else []})
            ops += [{"op": "decode", "id": request_id, "token": token} for token in answer[1:]]
            ops.append({"op": "free", "id": request_id})
            # The last sampled token is never computed, and the user does not send it back: 4 tokens of the answer come again.
            history[session] = prompt + answer[:4] + [20000 + 1000 * session + 100 * round_number + i for i in range(4)]
    scenario: Json = {"block_size": 4, "num_blocks": num_blocks, "groups": [{"type": "full"}, {"type": "swa", "window": 8}], "ops": ops}
    if retention_interval is not None:
        scenario["retention_interval"] = retention_interval
    return scenario, expected


CHATS: list[tuple[str, int, int | None, list[list[int]]]] = [
    ("36 blocks: a chat's window has gone before its next turn, so nobody hits anything", 36, None, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
    ("44 blocks: everybody hits all that was computed", 44, None, [[0, 0, 0], [28, 28, 28], [36, 36, 36]]),
    ("36 blocks, only the window at the end of a prompt is kept: two of three hit", 36, 0, [[0, 0, 0], [20, 20, 0], [0, 0, 0]]),
    ("44 blocks, only the window at the end of a prompt is kept: shorter hits for all", 44, 0, [[0, 0, 0], [20, 20, 20], [28, 28, 28]]),
]


def load_cases() -> list[Case]:
    """All of them; the scenario's name is the case's."""
    cases = [Case(**entry) for file in FILES for entry in json.loads((HERE / file).read_text(encoding="utf-8"))]
    for title, num_blocks, retention_interval, hits in CHATS:
        scenario, expected = chat_sessions(num_blocks, retention_interval, hits)
        cases.append(Case("A31", title, scenario, "oracle", expected))
    return [case._replace(scenario={"name": case.name, **case.scenario}) for case in cases]
