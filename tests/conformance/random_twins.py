"""A beginning that chance would hardly find: one block gets two further keys.

Two requests have prompts of one sequence that end at different hash boundaries inside one block, and go on with that sequence past the block's end. Each
registers the end of its prompt as a further key of its full block. The second is preempted and comes back: now it hits the first one's block, and registers
its key there as well.
"""

from __future__ import annotations

from functools import partial

from tests.conformance.random_manager import ManagerOperations


def plan_twins(draw: ManagerOperations) -> bool:
    """Puts the beginning on the plan of a manager scenario; False if its hashes are not fine enough."""
    unit = draw.hash_size
    sizes = [size for group, size in zip(draw.groups, draw.sizes, strict=True) if group["type"] in ("full", "mla", "rswa") and size >= 3 * unit]
    stem = draw.prompts.stems[0]
    if not sizes or not draw.caching or len(stem) < 2 * sizes[0]:
        return False
    size = draw.random.choice(sizes)
    begin = draw.random.randrange(len(stem) // size - 1) * size
    ends = draw.random.sample(range(begin + unit, begin + size, unit), 2)
    draw.echoes, draw.chunky, draw.odd = 1.0, 0.0, 0.0
    for number, end in enumerate(ends):

        def act(name: str, number: int = number, *words: object) -> partial[dict[str, object]]:
            return partial(lambda: getattr(draw, name)(draw.requests[number], *words))

        draw.plan += [partial(draw.add_prompt, stem[:end]), act("start"), act("done", number, begin + size + 1 - end), act("run"), act("done")]
    draw.plan += [act("give_back", 1, "preempt"), act("start"), act("done")]
    return True
