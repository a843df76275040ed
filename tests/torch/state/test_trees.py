"""Nested values are taken apart and put together by torch's own rules, but for None, which has no leaves."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_trees

from lowtide.torch.state.trees import FormError, Opaque, TreeForm, form_of, leaves_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Ball:
    place: Any
    speed: Any


class Bag:
    """Registered without key paths, and with something beside its children."""

    def __init__(self, items: list[Any], label: str) -> None:
        self.items = items
        self.label = label


torch_trees.register_dataclass(Ball)
torch_trees.register_pytree_node(Bag, lambda bag: (bag.items, bag.label), lambda items, label: Bag(list(items), label))

NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Ball, inner, inner)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_a_value_comes_back_from_its_leaves(value: Any) -> None:
    form = form_of(value)
    leaves = form.flatten(value)
    assert form.size == len(leaves) == len(form.names("x"))
    assert form.unflatten(leaves) == value
    assert leaves_of(value) == leaves


@given(NESTED)
def test_leaves_and_names_are_those_of_torch_without_none(value: Any) -> None:
    pairs = [(path, leaf) for path, leaf in torch_trees.tree_flatten_with_path(value)[0] if leaf is not None]
    assert leaves_of(value) == [leaf for _, leaf in pairs]
    assert form_of(value).names("x") == ["x" + torch_trees.keystr(path) for path, _ in pairs]


@given(NESTED)
def test_each_leaf_has_a_name_of_its_own(value: Any) -> None:
    names = form_of(value).names("x")
    assert len(set(names)) == len(names)


def test_containers_are_new_and_leaves_the_very_same() -> None:
    tensor = torch.ones(2)
    value = {"a": [tensor], "b": OrderedDict(c=(tensor, None))}
    again = form_of(value).unflatten(leaves_of(value))
    assert again is not value
    assert again["a"] is not value["a"]
    assert type(again["b"]) is OrderedDict
    assert all(leaf is tensor for leaf in leaves_of(again))


def test_named_tuples_keep_their_own_type() -> None:
    made = namedtuple("made", "h n")
    form = form_of((made(1, None), Pair(2, [3])))
    assert form.names("carry") == ["carry[0].h", "carry[1].left", "carry[1].right[0]"]
    first, second = form.unflatten([7, 8, 9])
    assert type(first) is made
    assert first == made(7, None)
    assert type(second) is Pair
    with pytest.raises(FormError, match=r"^a Pair at \[0\] where a made was$"):
        form.flatten((Pair(1, None), Pair(2, [3])))


def test_registered_dataclasses_are_read_by_their_fields() -> None:
    form = form_of({"ball": Ball(1, (2, None))})
    assert form.names("y") == ["y['ball'].place", "y['ball'].speed[0]"]
    assert form.unflatten([5, 6]) == {"ball": Ball(5, (6, None))}


def test_a_type_registered_without_key_paths_is_numbered() -> None:
    form = form_of([Bag([1, {"a": 2}], "mine")])
    assert form.names("y") == ["y[0][0]", "y[0][1]['a']"]
    (bag,) = form.unflatten([3, 4])
    assert (bag.items, bag.label) == ([3, {"a": 4}], "mine")
    with pytest.raises(FormError, match=r"^a Bag of 1 at \[0\] where one of 2 was$"):
        form.flatten([Bag([1], "mine")])


def test_what_torch_registers_itself_is_known() -> None:
    assert form_of(deque([1, 2], maxlen=3)).unflatten([3, 4]) == deque([3, 4], maxlen=3)
    values, indices = leaves_of(torch.tensor([[1.0, 4.0], [3.0, 2.0]]).max(0))
    assert (values.tolist(), indices.tolist()) == ([3.0, 4.0], [1, 0])


def test_none_has_no_leaves() -> None:
    form = form_of(None)
    assert (form.size, form.flatten(None), form.names("carry"), form.unflatten([])) == (0, [], [], None)
    assert leaves_of((None, {"a": None}, [])) == []


def test_the_order_of_a_dicts_keys_does_not_matter() -> None:
    form = form_of({"a": 1, "b": 2})
    assert form.flatten({"b": 20, "a": 10}) == [10, 20]
    assert list(form.unflatten([10, 20])) == ["a", "b"]


def test_a_single_value_is_its_own_leaf() -> None:
    tensor = torch.ones(2)
    form = form_of(tensor)
    assert (form.size, form.names("y")) == (1, ["y"])
    assert form.flatten(tensor)[0] is tensor
    assert form.unflatten(iter([5])) == 5


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (1, (1,), "a tuple where a single value was"),
        (1, None, "None where a single value was"),
        (None, 1, "a int where None was"),
        ((1, None), (1, [2]), r"a list at \[1\] where None was"),
        ((1, 2), [1, 2], "a list where a tuple was"),
        ((1, 2), None, "None where a tuple was"),
        ((1, 2), (1, 2, 3), "a tuple of 3 where one of 2 was"),
        ({"a": (1, [2])}, {"a": (1, [2, 3])}, r"a list of 2 at \['a'\]\[1\] where one of 1 was"),
        ({"a": 1}, {"a": {"b": 1}}, r"a dict at \['a'\] where a single value was"),
        ({"a": [1]}, {"a": [None]}, r"None at \['a'\]\[0\] where a single value was"),
        ({"a": 1}, OrderedDict(a=1), "a OrderedDict where a dict was"),
        ({"a": 1}, {"b": 1}, r"a dict with the keys \['b'\].* where there were \['a'\]"),
        ({"a": 1}, {"a": 1, "b": 2}, r"a dict with the keys \['a', 'b'\].* where there were \['a'\]"),
        (Ball(1, 2), Pair(1, 2), "a Pair where a Ball was"),
        (Ball(1, 2), Ball(1, [2]), r"a list at \.speed where a single value was"),
    ],
    ids=str,
)
def test_a_value_of_another_form_is_refused_with_its_place(was: Any, now: Any, message: str) -> None:
    with pytest.raises(FormError, match=f"^{message}$"):
        form_of(was).flatten(now)


def test_opaque_takes_anything_as_one_leaf() -> None:
    form = Opaque()
    value = [1, {"a": None}]
    assert form.size == 1
    assert form.flatten(value)[0] is value
    assert form.flatten(None) == [None]
    assert form.names("net.table") == ["net.table"]
    assert form.unflatten([value]) is value


def test_the_bare_form_has_no_structure() -> None:
    form = TreeForm()
    with pytest.raises(NotImplementedError):
        form.flatten(1)
    with pytest.raises(NotImplementedError):
        form.unflatten([1])
    with pytest.raises(NotImplementedError):
        form.names("x")
