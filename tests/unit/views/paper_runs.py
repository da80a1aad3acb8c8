"""Runs of the paper's engine without a model, for tests of what is drawn and said: Figures 5, 8, 9 and 10, and a group that is swapped out and comes back."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.paper.config import PaperConfig, PaperRequestSpec
from engine.paper_session import PaperSession
from engine.trace.events import AttentionComputed
from engine.trace.frame import Trace
from tests.unit.views.handmade import figure_6

TEXTS = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "mothers", "brought", "forth", "on", "this", "continent", "a", "new", "nation"]
WORDS = dict(enumerate(TEXTS))
FATHERS, MOTHERS, BROUGHT, FORTH, ON = (TEXTS.index(word) for word in ("fathers", "mothers", "brought", "forth", "on"))
PROMPT = tuple(range(7))


def run(config: PaperConfig, *specs: PaperRequestSpec, **scenario: Any) -> Trace:
    """The whole run; `scenario`: what its author says about it."""
    requests = [{"id": s.request_id, "n": s.n, "beam_width": s.beam_width, "prefix": s.prefix_id} for s in specs if not s.is_prefix]
    prefixes = [{"id": s.request_id} for s in specs if s.is_prefix]
    said = {"title": "A run", "requests": requests, "prefixes": prefixes, **scenario}
    return PaperSession(config, specs, vocabulary=lambda token_id: WORDS.get(token_id, f"w{token_id}"), scenario=said).run_to_end()


def figure_8() -> Trace:
    """Two samples of one prompt in blocks 7 and 1; the first copies block 1 to block 3."""
    spec = PaperRequestSpec("A", PROMPT, max_tokens=2, n=2, forced_token_ids=((FATHERS, BROUGHT), (MOTHERS, BROUGHT)))
    return run(PaperConfig(num_blocks=9, block_size=4, free_queue_order=(7, 1, 3)), spec, pair="parallel-sampling-v1")


def beams(width: int = 4, num_blocks: int = 13) -> Trace:
    """Beam search on a full block of prompt: every beam takes a block of its own; later the first two have all the children and the others are dropped."""
    first = tuple((0, FATHERS + i) for i in range(width))
    same = tuple((i, BROUGHT) for i in range(width))
    chosen = tuple((i % 2, FORTH + i) for i in range(width))
    spec = PaperRequestSpec("A", PROMPT[:4], max_tokens=8, beam_width=width, forced_beams=(first, same, same, same, same, chosen, same, same))
    return run(PaperConfig(num_blocks=num_blocks, block_size=4), spec)


def swapped() -> Trace:
    """Two samples give way to the older request, wait in the swap space and come back."""
    old = PaperRequestSpec("Z", tuple(range(8)), max_tokens=6, forced_token_ids=((FORTH,) * 6,))
    young = PaperRequestSpec("A", PROMPT, max_tokens=3, n=2, forced_token_ids=((FATHERS, BROUGHT, FORTH), (MOTHERS, BROUGHT, ON)))
    return run(PaperConfig(num_blocks=5, block_size=4, num_cpu_blocks=6, preemption_mode="swap"), old, young)


def shared_prefix() -> Trace:
    """A kept prefix of 5 tokens, and two requests that begin with it."""
    prefix = PaperRequestSpec("P", PROMPT[:5], max_tokens=0, is_prefix=True)
    requests = [PaperRequestSpec(name, (*PROMPT[:5], ON), max_tokens=2, forced_token_ids=((FORTH, BROUGHT),), prefix_id="P") for name in "AB"]
    return run(PaperConfig(num_blocks=8, block_size=4), prefix, *requests)


SHARES = [0.25, 0.6, 0.15]


def figure_5() -> Trace:
    """Figure 6's request, whose query of “brought” asks how much attention each block gets."""
    trace = figure_6()
    trace.header.config.update({"engine": "paper", "attention_shares": True})
    at, frame = [(i, f) for i, f in enumerate(trace.frames) if isinstance(f.event, AttentionComputed)][2]
    trace.frames[at] = msgspec.structs.replace(frame, event=msgspec.structs.replace(frame.event, block_shares=[SHARES], shares_layer=0))
    return trace
