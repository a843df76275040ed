"""Nested values copied without their tensors, made anew, put back and compared."""

from __future__ import annotations

import datetime
import itertools
import weakref
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lowtide.torch.state.structure import MOST_ENTRIES, Structure


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self) -> None:
        self.left = torch.ones(2)


def _value() -> dict[str, Any]:
    shared = [1, torch.zeros(3)]
    return {
        "list": shared,
        "again": shared,
        "tuple": (torch.ones(1), {"a": 2}),
        "array": array("d", [1.0, 2.0]),
        "bytes": bytearray(b"ab"),
        "numpy": np.arange(3),
        "count": itertools.count(4),
        "row": iter([1, 2, 3]),
        "set": {1, 2},
        "namespace": SimpleNamespace(n=1, inner=SimpleNamespace(t=torch.ones(2))),
        "slots": Slotted(),
    }


def test_a_value_made_anew_has_the_tensors_and_shares_what_was_shared() -> None:
    value, tensors = _value(), list[torch.Tensor]()
    structure = Structure([value], tensors)
    assert [id(tensors[number]) for number in structure.row(0)] == [id(t) for t in tensors]
    (twin,) = structure.values(tensors)
    assert twin["list"] is twin["again"] is not value["list"]
    assert twin["list"][1] is value["list"][1]
    assert next(twin["count"]) == 4 == next(value["count"])
    assert not hasattr(twin["slots"], "right")
    structure.forget_originals()


def test_it_is_put_back_into_the_very_same_objects() -> None:
    value, tensors = _value(), list[torch.Tensor]()
    structure = Structure([value], tensors)
    parts = dict(value)
    value["list"].append(5)
    value["array"][0] = value["bytes"][0] = value["numpy"][0] = 9
    value["set"].add(7)
    value["namespace"].n = 3
    value["new"] = 1
    next(value["count"])
    assert structure.put_back(tensors)[0] is value
    assert "new" not in value
    assert all(value[name] is part for name, part in parts.items() if name not in ("tuple", "count", "row"))
    assert (value["list"][0], len(value["list"]), value["array"][0], value["bytes"][0]) == (1, 2, 1.0, ord("a"))
    assert (value["namespace"].n, value["set"], next(value["count"])) == (1, {1, 2}, 4)


def test_what_differs_is_seen() -> None:
    def alike(one: Any, other: Any) -> bool:
        return Structure([one], []).is_like(0, Structure([other], []), 0)

    assert alike(_value(), _value())
    day = datetime.date(2020, 1, 1)
    assert alike([day], [day])
    assert not alike([day], [datetime.date(2020, 1, 1)])  # not one of ours to look into
    for one, other in (([1], [2]), ([1], (1,)), ({1}, {2}), (iter([1, 2]), iter([1])), (np.ones(1), np.zeros(1))):
        assert not alike([one], [other])
    odd = SimpleNamespace(n=float("nan"))
    odd.itself = odd
    assert alike(odd, odd)
    assert alike([float("nan")], [float("nan")])


def test_what_is_too_long_or_too_deep_is_left_as_it_is() -> None:
    long = [torch.ones(1)] * (MOST_ENTRIES + 1)
    deep: Any = torch.ones(1)
    for _ in range(40):
        deep = [deep]
    large = np.zeros(1_000_000)
    tensors: list[torch.Tensor] = []
    (one, other, third) = Structure([long, deep, large], tensors).values(tensors)
    assert one is long
    assert third is large
    assert tensors == []
    assert len(other) == 1


def test_tensors_are_replaced_where_they_are() -> None:
    value: Any = [torch.ones(1), (torch.ones(2), {"a": torch.ones(3)}), Slotted(), SimpleNamespace(t=torch.ones(4))]
    value.append(iter([1, 2]))
    inner, slots, row = value[1][1], value[2], value[4]
    new = [torch.zeros(k) for k in range(5)]
    assert Structure([value], []).put_back(new, rewinds=False)[0] is value
    assert value[0] is new[0]
    assert value[1][0] is new[1]
    assert value[1][1] is inner
    assert inner["a"] is new[2]
    assert value[2] is slots
    assert slots.left is new[3]
    assert value[3].t is new[4]
    assert value[4] is row


def test_a_container_of_the_users_own_class_keeps_its_attributes() -> None:
    class Rows(list[Any]):
        width = 0

    rows = Rows([1])
    rows.width = 3
    structure = Structure([rows], [])
    rows.width = 4
    rows.append(2)
    (twin,) = structure.values([])
    assert (type(twin), twin, twin.width) == (Rows, [1], 3)
    assert structure.put_back([])[0] is rows
    assert (rows, rows.width) == ([1], 3)


def test_an_iterator_that_occurs_twice_stays_one() -> None:
    rows = iter([1, 2, 3])
    structure = Structure([rows, [rows]], [])
    for one, (other,) in (structure.values([]), structure.put_back([])):
        assert one is other is not rows
        assert next(one) == 1


def test_what_has_not_changed_is_not_written_to() -> None:
    frozen = np.ones(2)
    frozen.flags.writeable = False
    small = {8, 0}  # the order of a set is that in which it was filled
    (again,) = Structure([[frozen, small]], []).put_back([])
    assert again[0] is frozen
    assert list(small) == [8, 0]


def test_a_reference_is_alike_only_to_itself() -> None:
    """To compare two of them would compare what they refer to, and tensors have no one answer."""
    one, other = torch.ones(2), torch.ones(2)
    first, second = Structure([weakref.ref(one)], []), Structure([weakref.ref(other)], [])
    assert first.is_like(0, first, 0)
    assert not first.is_like(0, second, 0)
