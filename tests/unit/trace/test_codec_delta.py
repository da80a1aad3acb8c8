"""What changed from one sequence to the next: small, the same however the sequences are kept, and enough to get them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.codec_delta import Replay, apply_changes, find_changes, find_moves
from engine.trace.shared_sequence import SequenceEditor, SharedSequence

Entry = tuple[str, int]


def key(entry: Entry) -> str:
    return entry[0]


QUEUES = st.lists(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2)), max_size=10), min_size=1, max_size=5)


@given(QUEUES)
def test_following_the_moves_gives_every_version_back(versions: list[list[Entry]]) -> None:
    """Also when keys stand twice, as in the frame of a broken queue."""
    replay: Replay[str, Entry] = Replay(key)
    before: list[Entry] = []
    for version in versions:
        moves = find_moves(before, version, key)
        assert (moves is None) == (before == version)
        assert replay.follow(moves) == version
        before = version


@given(st.integers(0, 80), st.data())
def test_moves_depend_on_the_elements_alone(number: int, data: st.DataObject) -> None:
    """R1.5 to R1.7 and R1.10: pops, removals from the middle, both ends, and a key that is put in again; by places and by content alike."""
    editor: SequenceEditor[str, Entry] = SequenceEditor((str(i), (str(i), 0)) for i in range(number))
    fresh = number
    for _ in range(data.draw(st.integers(1, 5))):
        old = editor.sequence
        keys = [k for k, _ in old]
        out = data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=6)) if keys else []
        again = data.draw(st.lists(st.sampled_from(out), unique=True, max_size=2)) if out and data.draw(st.booleans()) else []
        stay = [k for k in keys if k not in out]
        replaced = data.draw(st.lists(st.sampled_from(stay), unique=True, max_size=3)) if stay else []
        head, tail = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
        names = [str(fresh + i) for i in range(head + tail)]
        fresh += head + tail
        editor.apply(
            out, [(k, (k, 0)) for k in names[:head]], [(k, (k, 0)) for k in (*names[head:], *again)], [(k, (k, data.draw(st.integers(0, 1)))) for k in replaced]
        )
        new = editor.sequence
        moves = find_moves(old, new, key)
        assert moves == find_moves(tuple(old), tuple(new), key)
        if moves is not None and moves.whole is None and not again:
            assert sorted(moves.out) == sorted(out)
            assert len(moves.head) + len(moves.tail) == head + tail


def test_a_pop_from_a_long_queue_is_one_number() -> None:
    editor: SequenceEditor[int, int] = SequenceEditor((i, i) for i in range(1, 5_000))
    before = editor.sequence
    moves = find_moves(before, editor.apply(out=[1]), lambda block_id: block_id)
    assert moves is not None
    assert (moves.out, moves.head, moves.tail, moves.replace, moves.whole) == ([1], [], [], [], None)


@given(st.lists(st.lists(st.integers(0, 2), max_size=70), min_size=1, max_size=5))
def test_changes_by_index_give_every_version_back(versions: list[list[int]]) -> None:
    before: SharedSequence[int] = SharedSequence()
    for version in versions:
        changes = find_changes(before, version)
        assert changes == find_changes(tuple(before), version) == find_changes(before, SharedSequence(version))
        before = apply_changes(before, changes, len(version))
        assert before == version


@pytest.mark.parametrize(("changes", "length"), [([(5, 1)], 3), ([(-1, 1)], 2), ([], 3), ([], -1), ([(2, 1), (4, 1)], 4), ([(10**30, 1)], 3)])
def test_changes_that_lead_nowhere_are_refused(changes: list[tuple[int, int]], length: int) -> None:
    with pytest.raises(IndexError):
        apply_changes(SharedSequence([0, 0]), changes, length)
