"""Shared sequences against plain lists and dicts: they behave like tuples, old versions stay, and versions share all they can."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.trace.shared_sequence import ABSENT, WIDTH, Absent, SequenceEditor, SharedSequence


def nodes(sequence: SharedSequence[Any]) -> set[int]:
    """The nodes of the tree, by identity."""
    found: set[int] = set()
    level = [sequence._root] if sequence._root is not None else []
    for height in range(sequence._height, -1, -1):
        found.update(map(id, level))
        level = [child for node in level for child in node.items if child is not None] if height else []
    return found


@given(st.lists(st.integers()), st.lists(st.integers()))
def test_it_reads_like_a_tuple(items: list[int], others: list[int]) -> None:
    sequence, plain = SharedSequence(items), tuple(items)
    assert tuple(sequence) == plain
    assert tuple(reversed(sequence)) == plain[::-1]
    assert len(sequence) == len(plain)
    assert [sequence[i] for i in range(-len(plain), len(plain))] == [plain[i] for i in range(-len(plain), len(plain))]
    assert sequence[1:-1] == plain[1:-1]
    assert sequence[::2] == plain[::2]
    assert bool(sequence) == bool(plain)
    assert all(i in sequence for i in plain)
    assert sequence == plain
    assert plain == sequence
    assert list(plain) == sequence
    assert (sequence == SharedSequence(others)) == (items == others)
    assert (sequence != tuple(others)) == (items != others)
    assert hash(sequence) == hash(plain)
    for index in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            sequence[index]


def test_it_is_equal_to_no_other_kind() -> None:
    assert SharedSequence([1]) != {1}
    assert SharedSequence() == ()


@given(
    st.lists(st.integers(0, 9), max_size=200),
    st.lists(st.dictionaries(st.integers(-3 * WIDTH, 40 * WIDTH), st.one_of(st.just(ABSENT), st.integers(0, 9)), max_size=20), max_size=6),
)
def test_changes_by_place_agree_with_a_dict_and_leave_old_versions_alone(items: list[int], steps: list[dict[int, int | Absent]]) -> None:
    model: dict[int, int] = dict(enumerate(items))
    versions: list[tuple[SharedSequence[int], dict[int, int]]] = [(SharedSequence(items), model)]
    for changes in steps:
        model = {place: value for place, value in {**model, **changes}.items() if not isinstance(value, Absent)}
        versions.append((versions[-1][0].with_changes(changes), model))
    for sequence, model in versions:
        assert list(sequence.places()) == sorted(model.items())
        assert tuple(sequence) == tuple(value for _, value in sorted(model.items()))
        assert [sequence[i] for i in range(len(sequence))] == list(sequence)
        assert sequence.is_dense <= (sorted(model) == list(range(len(model))))
        assert all(sequence.at(place) == model.get(place, ABSENT) for place in range(-3 * WIDTH, 41 * WIDTH, 7))
        for older, old_model in versions:
            different = {p for p in {*model, *old_model} if model.get(p) != old_model.get(p)}
            found = sequence.changes_since(older)
            assert [place for place, _, _ in found] == sorted(different)
            assert all((a, b) == (old_model.get(place, ABSENT), model.get(place, ABSENT)) for place, a, b in found)


def test_no_change_is_the_same_object() -> None:
    sequence = SharedSequence(range(100))
    assert sequence.with_changes({}) is sequence
    assert sequence.with_changes({7: 7}) is sequence


@pytest.mark.parametrize("length", [1_000, 10_000, 100_000])
def test_a_change_makes_as_many_nodes_as_the_tree_is_high(length: int) -> None:
    """No step in proportion to the length: 2, 3 and 4 levels of 32."""
    sequence = SharedSequence(range(length))
    changed = sequence.with_changes({length // 2: -1})
    assert len(nodes(changed) - nodes(sequence)) == sequence._height + 1 <= 4
    assert changed.changes_since(sequence) == [(length // 2, length // 2, -1)]


def test_copies_know_empty_places() -> None:
    sequence = SharedSequence(range(70)).with_changes({3: ABSENT, 64: ABSENT})
    for other in (copy.deepcopy(sequence), pickle.loads(pickle.dumps(sequence))):
        assert other == sequence
        assert len(other) == 68


class EditorMachine(RuleBasedStateMachine):
    """A queue of distinct keys: popped at the head, put in front, appended, taken out of the middle, replaced."""

    @initialize(number=st.integers(0, 100))
    def begin(self, number: int) -> None:
        self.model: list[tuple[int, str]] = [(i, str(i)) for i in range(number)]
        self.next = number
        self.editor: SequenceEditor[int, tuple[int, str]] = SequenceEditor((k, (k, v)) for k, v in self.model)
        self.versions: list[tuple[SharedSequence[tuple[int, str]], tuple[tuple[int, str], ...]]] = []

    def fresh(self, number: int) -> list[tuple[int, tuple[int, str]]]:
        self.next += number
        return [(k, (k, str(k))) for k in range(self.next - number, self.next)]

    @rule(number=st.integers(0, 40))
    def pop(self, number: int) -> None:
        self.editor.apply(out=[k for k, _ in self.model[:number]])
        del self.model[:number]

    @rule(number=st.integers(0, 40))
    def prepend(self, number: int) -> None:
        come = self.fresh(number)
        self.editor.apply(head=come)
        self.model[:0] = [value for _, value in come]

    @rule(number=st.integers(0, 40))
    def append(self, number: int) -> None:
        come = self.fresh(number)
        self.editor.apply(tail=come)
        self.model += [value for _, value in come]

    @rule(data=st.data())
    def take_out_and_put_again(self, data: st.DataObject) -> None:
        """One call: some keys leave, of which some come back at either end, and one is replaced where it stands."""
        if len(self.model) < 4:
            return
        indices = data.draw(st.lists(st.integers(0, len(self.model) - 1), min_size=2, max_size=5, unique=True))
        gone = [self.model[i] for i in indices]
        head, tail = [(k, (k, v)) for k, v in gone[:1]], [(k, (k, v + "!")) for k, v in gone[1:2]]
        self.model = [pair for pair in self.model if pair not in gone]
        replaced = [(k, (k, v + "?")) for k, v in self.model[:1]]
        self.editor.apply([k for k, _ in gone], head, tail, replaced)
        self.model = [value for _, value in (*head, *replaced)] + self.model[1:] + [value for _, value in tail]

    @invariant()
    def same(self) -> None:
        sequence = self.editor.sequence
        assert list(sequence) == self.model
        assert [sequence[i] for i in range(0, len(sequence), 5)] == self.model[::5]
        self.versions.append((sequence, tuple(self.model)))
        assert all(old == was for old, was in self.versions[-4:])
        assert len(nodes(sequence)) <= 4 + len(sequence) + self.next // WIDTH  # what left leaves nothing behind


TestEditorMachine = EditorMachine.TestCase


def test_an_editor_refuses_what_is_not_there_or_there_twice() -> None:
    editor: SequenceEditor[int, int] = SequenceEditor([(1, 1)])
    assert 1 in editor
    assert 2 not in editor
    with pytest.raises(KeyError):
        editor.apply(out=[2])
    with pytest.raises(ValueError, match="1 stands in the sequence already"):
        editor.apply(tail=[(1, 1)])
