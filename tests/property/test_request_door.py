"""Who is let in finishes when nobody else is there, whatever the cache holds; who is not could not (R3.3, R3.4, R3.43, R3.50, R7.4)."""

from __future__ import annotations

from typing import Any

from hypothesis import event, given, reject
from hypothesis import strategies as st

from engine.errors import InvalidInput
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import KINDS, Mix, mixes

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@st.composite
def engines(draw: st.DrawFn, enable_caching: bool, async_scheduling: bool | None = None, kinds: tuple[str, ...] = KINDS) -> DrivenScheduler:
    """Small pools, budgets of every size."""
    mix: Mix = draw(mixes(enable_caching, kinds))
    settings: dict[str, Any] = {
        "async_scheduling": draw(st.booleans()) if async_scheduling is None else async_scheduling,
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 4, 8, 9, 64])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
    }
    try:
        return DrivenScheduler(mix, 1 + mix.num_for_one_token + draw(st.integers(0, 16)), enable_caching=enable_caching, **settings)
    except InvalidInput:
        reject()


@given(engines(enable_caching=True), st.lists(st.tuples(TOKENS, st.integers(1, 8)), min_size=1, max_size=4), st.data())
def test_who_is_let_in_finishes_alone(engine: DrivenScheduler, lengths: list[tuple[list[int], int]], data: st.DataObject) -> None:
    """One after the other, so that each has the pool to itself and the cache of those before it; some go on with what an earlier one said."""
    said: list[list[int]] = [[]]
    for tail, num_outputs in lengths:
        known = data.draw(st.sampled_from(said))
        prompt = [*known[: data.draw(st.integers(0, len(known)))], *tail][:36]
        request = engine.make(prompt, data.draw(st.lists(st.integers(0, 1), min_size=num_outputs, max_size=num_outputs)))
        try:
            engine.add(request)
        except InvalidInput:
            event("refused")
            continue
        assert engine.run_to_end() is None, f"{request} waits for ever in an empty pool"
        said.append(list(request.all_token_ids))


@given(engines(enable_caching=False, async_scheduling=False, kinds=tuple(kind for kind in KINDS if kind != "align")), TOKENS, st.integers(1, 12))
def test_who_is_refused_could_not_finish(engine: DrivenScheduler, prompt: list[int], num_outputs: int) -> None:
    """Without hits, which may need a block or two more, one step at a time, and where chunks are not cut, the count is exact."""
    request = engine.make(prompt, [0] * num_outputs)
    try:
        engine.scheduler.check_request(request)
    except InvalidInput:
        engine.add(request, at_the_door=False)
        event("refused")
        assert engine.run_to_end(patience=50) == request.request_id, "the door was too strict"
