"""What a function can reach beside its arguments: modules, objects, variables, containers, tensors, generators.

One walk over the function itself, what it closes over, its defaults, the globals that it names, the entries of small
containers and the attributes of the user's own objects. Whoever walks says what to do with each find.
"""

from __future__ import annotations

import argparse
import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn

MISSING = object()
# Nobody keeps state of the user's in these packages, and following their functions would lead through all of them.
_FOREIGN = frozenset({"torch", "numpy", "lowtide", "builtins"}) | sys.stdlib_module_names - {"__main__"}
# Nothing can be reached through these, or changed in them.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, slice, range, types.ModuleType}
    | {types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_CODE = frozenset({type(None), type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType})
CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_NAMESPACES = frozenset({types.SimpleNamespace, argparse.Namespace})
# Of longer containers only the first entries are looked at: those are data.
_MOST_ENTRIES = 100


class Slot(Protocol):
    """A place that holds a value."""

    @property
    def label(self) -> str:
        """What messages call it."""

    @property
    def in_module(self) -> bool:
        """Whether it belongs to a module."""

    def get(self) -> Any:
        """The value, or MISSING."""

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One entry of a dictionary, such as a module's buffers or an object's attributes."""

    mapping: dict[str, Any]
    key: str
    label: str
    in_module: bool

    def get(self) -> Any:
        """See `Slot`."""
        return self.mapping.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        """See `Slot`."""
        if value is MISSING:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A variable that a function closes over."""

    cell: types.CellType
    label: str
    in_module: bool = False

    def get(self) -> Any:
        """See `Slot`."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not bound yet
            return MISSING

    def set(self, value: Any) -> None:
        """See `Slot`."""
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


class Reach:
    """The walk. `find` each root; what is found is handed to the methods whose names begin with `on_`, once."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """A module. `names` are those in the code that reaches it, None where it is itself what is called."""
        raise NotImplementedError

    def on_object(self, thing: Any, label: str) -> None:
        """An object of a class of the user's own; its attributes are walked next."""
        raise NotImplementedError

    def on_variable(self, slot: Variable) -> None:
        """A variable that a function closes over."""
        raise NotImplementedError

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """A tensor."""
        raise NotImplementedError

    def on_generator(self, generator: Any) -> None:
        """A random generator, of torch, numpy or Python."""
        raise NotImplementedError

    def on_container(self, container: Any, label: str) -> None:
        """A list, dict, set or deque; its entries are walked next."""

    def on_array(self, array: np.ndarray[Any, Any]) -> None:
        """A numpy array."""

    def on_global(self, slot: Entry) -> None:
        """A global variable that a function reads or assigns to."""

    def find(self, thing: Any, label: str = "", names: frozenset[str] | None = None) -> None:
        """Walk from here."""
        if type(thing) in ATOMS or id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            self.on_tensor(thing, label)
        elif isinstance(thing, nn.Module):
            self.on_module(thing, label or type(thing).__name__, names)
        elif isinstance(thing, GENERATORS):
            self.on_generator(thing)
        elif isinstance(thing, tuple):
            for part in thing[:_MOST_ENTRIES]:
                self.find(part, label, names)
        elif isinstance(thing, CONTAINERS):
            self.on_container(thing, label)
            for key, part in _entries(thing):
                self.find(part, f"{label}[{key!r}]", names)
        elif isinstance(thing, np.ndarray):
            self.on_array(thing)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self.find(part, label, names)
        elif isinstance(thing, types.MethodType):
            self.find(thing.__self__, label, names)
            self.find(thing.__func__, label, names)
        elif isinstance(thing, types.FunctionType):
            if not _is_foreign(thing.__module__):
                self._find_in_function(thing)
        elif _is_users_object(thing):
            path = label or type(thing).__name__
            if hasattr(thing, "__dict__"):
                self.on_object(thing, path)
            for name, value in _attributes(thing):
                self.find(value, f"{path}.{name}", names)

    def _find_in_function(self, function: types.FunctionType) -> None:
        code = _Code.of(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            slot = Variable(cell, name)
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self.on_variable(slot)
            self.find(slot.get(), name, code.names)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.find(default, "a default argument", code.names)
        space = function.__globals__
        for name in code.loads:
            value = space.get(name)
            if type(value) not in _CODE:
                self.on_global(Entry(space, name, name, in_module=False))
                self.find(value, name, code.names)
            elif type(value) is types.FunctionType:
                self.find(value, name)
        for name in code.stores:
            self.on_global(Entry(space, name, name, in_module=False))


@dataclass(frozen=True, slots=True)
class _Code:
    """The names in a function's code: globals that it reads, globals that it assigns to, and all together."""

    code: types.CodeType  # kept, so that its identity stays its own
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    names: frozenset[str]

    _known: ClassVar[dict[int, _Code]] = {}

    @classmethod
    def of(cls, code: types.CodeType) -> _Code:
        known = cls._known.get(id(code))
        if known is None:
            if len(cls._known) > 10_000:  # code that is made anew all the time
                cls._known.clear()
            known = cls._known[id(code)] = cls._read(code)
        return known

    @classmethod
    def _read(cls, code: types.CodeType) -> _Code:
        loads: dict[str, None] = {}
        stores: dict[str, None] = {}
        names = set(code.co_names)
        for line in dis.get_instructions(code):
            if line.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                loads[line.argval] = None
            elif line.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stores[line.argval] = None
        for inner in code.co_consts:  # comprehensions, functions made inside
            if isinstance(inner, types.CodeType):
                nested = cls.of(inner)
                loads.update(dict.fromkeys(nested.loads))
                stores.update(dict.fromkeys(nested.stores))
                names |= nested.names
        return cls(code, tuple(loads), tuple(stores), frozenset(names))


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return islice(pairs, _MOST_ENTRIES)


def _is_foreign(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in _FOREIGN


def _is_users_object(thing: Any) -> bool:
    """An instance of a class of the user's own that can keep attributes."""
    kind = type(thing)
    if kind in _NAMESPACES:
        return True
    return (hasattr(thing, "__dict__") or hasattr(kind, "__slots__")) and not (
        isinstance(thing, type | types.ModuleType) or _is_foreign(kind.__module__)
    )


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)
