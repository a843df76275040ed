"""Nested values copied without their tensors: what a list, a cache or an object was at some moment.

Containers, arrays, iterators and plain objects are copied, what occurs twice stays one, and tensors are taken out. From
such a structure the value can be made anew, any number of times, so that a rerun finds it as it was while the user's
own objects are not touched; or the very objects that it was taken from can be given the contents that they had.
Modules, functions, generators and objects of torch's, numpy's and Python's own classes are what they are, and are not
copied. Places are where such values are kept: entries of dictionaries, and slots of classes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import sysconfig
import types
import weakref
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

_REFERENCES = frozenset({weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType})
# Nothing can be changed in these, and nothing that can be is reached through them.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, slice, range, types.ModuleType, types.FunctionType}
    | {types.BuiltinFunctionType, types.MethodType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | _REFERENCES
)
NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})
# Attributes that every module has, and which are torch's.
MODULE_INTERNALS = frozenset(nn.Module().__dict__)
MOST_ENTRIES = 10_000  # of a container; a longer one is data
_MOST_DEPTH = 16
_FOREIGN = frozenset({"torch", "numpy", "lowtide", "builtins"})
_STDLIB = sysconfig.get_paths()["stdlib"]
_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))
_KEEPERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # of the standard library, for the user's
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType})
_CONTAINERS = (list, dict, set, deque)
_ARRAYS = (np.ndarray, array, bytearray)
_SMALL_ARRAY = 1024 * 1024  # bytes
# Iterators of which a copy goes on where they are. Those that stand on other iterators share them with their copies.
_ROWS: tuple[Iterable[Any], ...] = ([], (), "", range(0))
_ITERATORS: tuple[type, ...] = (itertools.count, itertools.repeat, *(type(iter(row)) for row in _ROWS))
_WHOLE = (*_ARRAYS, *_ITERATORS)
_FLAT = frozenset({set, *_ARRAYS})

Leaf = Callable[[Any], Any]
_Tensors = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]  # by their numbers
_Memo = dict[int, tuple[Any, Any]]  # by the identity of an original: itself, and its twin


@functools.cache
def is_foreign(module_name: str | None) -> bool:
    """Whether a module of this name is one of torch's, numpy's or Python's own."""
    top = (module_name or "").partition(".")[0]
    if top not in sys.stdlib_module_names or top == "__main__":
        return top in _FOREIGN
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or file.startswith(_STDLIB)  # somebody's own `trace.py` is not


@functools.cache
def is_installed(module_name: str) -> bool:
    """Whether a module of this name is from a package that was installed, not of the user's own."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)


_plain_kinds: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_plain_object(kind: type[Any]) -> bool:
    """Whether instances of the class are objects of the user's that keep attributes."""
    known = _plain_kinds.get(kind)
    if known is None:
        known = _plain_kinds[kind] = _keeps_attributes(kind)
    return known


def _keeps_attributes(kind: type[Any]) -> bool:
    if issubclass(kind, _KEEPERS):
        return True
    if is_foreign(kind.__module__) or issubclass(kind, nn.Module | torch.Tensor | type | BaseException | Enum):
        return False
    if hasattr(kind, "__del__"):  # a copy of it would do, when it dies, what only the original is to do
        return False
    try:
        object.__new__(kind)
    except TypeError:  # it is more than its attributes: a number, for one
        return False
    return kind.__dictoffset__ != 0 or any("__slots__" in base.__dict__ for base in kind.__mro__)


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that can be copied."""
    return isinstance(value, _ITERATORS)


def slots_of(thing: Any) -> Iterator[Any]:
    """The descriptors of those attributes of an object for which its class has slots."""
    for kind in type(thing).__mro__:
        for descriptor in kind.__dict__.values() if "__slots__" in kind.__dict__ else ():
            if type(descriptor) is types.MemberDescriptorType:
                yield descriptor


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object, among them those for which its class has slots."""
    attributes = dict(getattr(thing, "__dict__", {}))
    for descriptor in slots_of(thing):
        with suppress(AttributeError):  # not set
            attributes[descriptor.__name__] = descriptor.__get__(thing)
    return attributes


def holds_modules(thing: Any) -> bool:
    """Whether an object has modules among its attributes, as a trainer has: then it is nobody's state."""
    return any(isinstance(value, nn.Module) for value in getattr(thing, "__dict__", {}).values())


class _Place:
    """Where a tensor goes."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Structure:
    """Values as they were at some moment, without their tensors, which are numbered in their order."""

    __slots__ = ("_memo", "_twins", "ends")

    def __init__(self, values: Sequence[Any], tensors: list[torch.Tensor], found: list[Any] | None = None) -> None:
        """Copy values; their tensors are appended to `tensors`, and whatever else is not copied to `found`."""
        self._memo: _Memo = {}
        self._twins: list[Any] = []
        self.ends: list[int] = []  # by value, how many tensors it and those before it have

        def take(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                return _Place(len(tensors) - 1)
            if found is not None:
                found.append(leaf)
            return leaf

        for value in values:
            self._twins.append(_copied(value, take, self._memo, 0))
            self.ends.append(len(tensors))

    def row(self, place: int) -> range:
        """The numbers of the tensors of the value at a place."""
        return range(self.ends[place - 1] if place else 0, self.ends[place])

    def values(self, tensors: _Tensors, places: Iterable[int] | None = None) -> list[Any]:
        """New values of this structure, or those at some places, with these tensors."""
        memo: _Memo = {}

        def put(leaf: Any) -> Any:
            return tensors[leaf.number] if type(leaf) is _Place else leaf

        twins = self._twins if places is None else [self._twins[place] for place in places]
        return [_copied(twin, put, memo, 0) for twin in twins]

    def put_back(self, tensors: Sequence[torch.Tensor], *, rewinds: bool = True) -> list[Any]:
        """The very objects that it was taken from, which are given the contents that they, and those inside, had then.

        Only iterators are others, since none can be put back where it was. Without `rewinds` they, too, stay.
        """
        originals = {
            id(twin): copy.copy(twin) if rewinds and is_iterator(twin) else original
            for original, twin in self._memo.values()
        }
        original_of = functools.partial(_original, originals=originals, tensors=tensors)
        for original, twin in self._memo.values():
            _refill(original, twin, original_of)
        return [original_of(twin) for twin in self._twins]

    def is_like(self, place: int, other: Structure, its_place: int) -> bool:
        """Whether the value at a place is like one of another structure; tensors are not looked at."""
        return _alike(self._twins[place], other._twins[its_place], set())

    def forget_originals(self) -> None:
        """Let go of the objects that it was taken from."""
        self._memo = {}


def _original(part: Any, originals: dict[int, Any], tensors: Sequence[torch.Tensor]) -> Any:
    """What a twin, or a part of one, was copied from; a tuple is made anew, with its tensors."""
    if type(part) is _Place:
        return tensors[part.number]
    if isinstance(part, tuple) and type(part) not in ATOMS:
        return _rebuilt(part, (_original(inner, originals, tensors) for inner in part))
    return originals.get(id(part), part)


def _copied(value: Any, leaf: Leaf, memo: _Memo, depth: int) -> Any:
    """A copy of a nested value whose leaves are what `leaf` returns for them; what occurs twice stays one."""
    kind = type(value)
    if kind in ATOMS:
        return leaf(value) if kind in _FUNCTIONS else value
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if id(value) in memo:
        return memo[id(value)][1]
    if depth > _MOST_DEPTH:
        return value

    def inner(part: Any) -> Any:
        return _copied(part, leaf, memo, depth + 1)

    if isinstance(value, tuple):
        return _rebuilt(value, map(inner, value))
    if isinstance(value, _CONTAINERS):
        return value if len(value) > MOST_ENTRIES else _copied_container(value, inner, memo)
    if isinstance(value, _WHOLE):
        return _copied_whole(value, memo)
    if is_plain_object(kind) and not holds_modules(value):
        twin: Any = (kind if issubclass(kind, types.SimpleNamespace) else object).__new__(kind)
        memo[id(value)] = (value, twin)
        _fill_attributes(twin, value, inner)
        return twin
    return leaf(value)


def _copied_whole(value: Any, memo: _Memo) -> Any:
    """A copy of an array or an iterator."""
    if not is_iterator(value) and memoryview(value).nbytes > _SMALL_ARRAY:
        return value
    twin = copy.copy(value)
    memo[id(value)] = (value, twin)
    return twin


def _rebuilt(value: Any, parts: Iterable[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # of C, such as what `max` returns
        return kind(tuple(parts))
    return tuple.__new__(kind, parts)  # named ones may check what they are made of, and it is not all there yet


def _copied_container(value: Any, inner: Leaf, memo: _Memo) -> Any:
    kind: Any = type(value)
    twin = kind.__new__(kind)
    if isinstance(value, deque):
        deque.__init__(twin, maxlen=value.maxlen)
    memo[id(value)] = (value, twin)
    if hasattr(value, "default_factory"):
        twin.default_factory = value.default_factory
    _fill_container(twin, value, inner)
    return twin


def _fill_container(twin: Any, value: Any, inner: Leaf) -> None:
    """Fill an empty container with what `inner` makes of the entries of another."""
    if isinstance(value, dict):
        for key in list(dict.keys(value)):  # as stored: some make something of an entry whenever they are asked
            dict.__setitem__(twin, key, inner(dict.__getitem__(value, key)))
    elif isinstance(value, set):
        set.update(twin, map(inner, value))
    else:
        (list if isinstance(value, list) else deque).extend(twin, map(inner, value))
    if not is_foreign(type(value).__module__):
        _fill_attributes(twin, value, inner)


def _fill_attributes(twin: Any, value: Any, inner: Leaf) -> None:
    if type(value).__dictoffset__:
        attributes = {name: inner(part) for name, part in vars(value).items()}
        vars(twin).clear()
        vars(twin).update(attributes)
    for descriptor in slots_of(value):
        with suppress(AttributeError):  # not set
            descriptor.__set__(twin, inner(descriptor.__get__(value)))


def _refill(original: Any, twin: Any, inner: Leaf) -> None:
    """Give an object the contents of its twin again."""
    if type(original) in _FLAT and _alike(original, twin, set()):
        return  # an array may be one that nobody can write to, and a set has its entries in an order
    if isinstance(original, _CONTAINERS):
        base: Any = next(kind for kind in _CONTAINERS if isinstance(original, kind))
        base.clear(original)
        _fill_container(original, twin, inner)
    elif isinstance(original, np.ndarray):
        original[...] = twin
    elif isinstance(original, _ARRAYS):
        original[:] = twin
    elif not is_iterator(original):
        _fill_attributes(original, twin, inner)


def _alike(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    kind = type(one)
    if one is other or (id(one), id(other)) in seen:
        return True
    if kind is not type(other):
        return False
    if kind is _Place:
        return True  # whoever asks compares the tensors
    if kind in ATOMS:  # what two references refer to is not asked
        return kind not in _REFERENCES and bool(one == other or one != one)
    seen.add((id(one), id(other)))
    if isinstance(one, (set, *_WHOLE)):
        return bool(_contents(one) == _contents(other))
    ours, theirs = _inside(one), _inside(other)
    if ours is None or theirs is None:
        return False
    return list(ours) == list(theirs) and all(map(_alike, ours.values(), theirs.values(), itertools.repeat(seen)))


def _inside(value: Any) -> dict[Any, Any] | None:
    """What is inside a container or a plain object, by place; None for anything else."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, tuple | list | deque):
        return dict(enumerate(value))
    return attributes_of(value) if is_plain_object(type(value)) else None


def _contents(value: Any) -> Any:
    """What tells a set, an array or an iterator from others of its kind: of an iterator, how far it is."""
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if not is_iterator(value):
        return value
    hint = getattr(value, "__length_hint__", None)
    return repr(value) if hint is None or isinstance(value, itertools.repeat) else hint()


# --- places where values are: entries of dictionaries, such as a module's attributes, and slots of classes

MISSING: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One entry of a dictionary."""

    mapping: dict[Any, Any]
    key: Any
    label: str = ""

    def get(self) -> Any:
        """The value, or MISSING."""
        return self.mapping.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""
        if value is MISSING:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class SlotEntry:
    """One attribute of an object for which its class has a slot."""

    owner: Any
    descriptor: Any
    label: str = ""

    def get(self) -> Any:
        """The value, or MISSING."""
        try:
            return self.descriptor.__get__(self.owner)
        except AttributeError:
            return MISSING

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""
        if value is not MISSING:
            self.descriptor.__set__(self.owner, value)
        elif self.get() is not MISSING:
            self.descriptor.__delete__(self.owner)


Place = Entry | SlotEntry


def own_places(thing: Any) -> list[Place]:
    """Where an object of the user's has its numbers and tensors. Its containers are the user's, and not among them."""
    kind, attributes = type(thing).__name__, getattr(thing, "__dict__", {})
    places: list[Place] = [Entry(attributes, name, f"{kind}.{name}") for name in attributes]
    places += [SlotEntry(thing, slot, f"{kind}.{slot.__name__}") for slot in slots_of(thing)]
    return [place for place in places if _is_own(place.get())]


def _is_own(value: Any) -> bool:
    return value is MISSING or type(value) in NUMBERS or isinstance(value, torch.Tensor)
