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
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn

MISSING = object()
# Attributes that every module has, and which are torch's.
MODULE_INTERNALS = frozenset(nn.Module().__dict__)
# Nobody keeps state of the user's in these packages, and following their functions would lead through all of them.
_FOREIGN = frozenset({"torch", "numpy", "lowtide", "builtins"})
_STDLIB = sysconfig.get_paths()["stdlib"]
# Nothing can be reached through these, or changed in them.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, slice, range, types.ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {weakref.ProxyType, weakref.CallableProxyType}
)
_CODE = frozenset({type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType})
CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NAMESPACES = frozenset({types.SimpleNamespace, argparse.Namespace})
# Of longer containers only the first entries are looked at: those are data. Nor is anything further away than this.
_MOST_ENTRIES = 100
_MOST_DEPTH = 40
_MOST_CODES = 10_000


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

    __slots__ = ("_depth", "_seen")

    def __init__(self) -> None:
        self._depth = 0
        self._seen: set[int] = set()

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """A module. `names` are those in the code that reaches it, None where it is itself what is called."""

    def on_function(self) -> None:
        """A function of the user's own; what it uses is walked next."""

    def on_object(self, thing: Any, label: str) -> None:
        """An object of a class of the user's own; its attributes are walked next."""

    def on_variable(self, slot: Variable) -> None:
        """A variable that a function closes over."""

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """A tensor."""

    def on_generator(self, generator: Any) -> None:
        """A random generator, of torch, numpy or Python."""

    def on_container(self, container: Any, label: str) -> None:
        """A list, dict, set or deque; its entries are walked next."""

    def on_slot(self, slot: Member) -> None:
        """An attribute that a class has a slot for."""

    def on_array(self, array: np.ndarray[Any, Any]) -> None:
        """A numpy array."""

    def on_global(self, slot: Entry) -> None:
        """A global variable that a function reads or assigns to."""

    def find(self, thing: Any, label: str = "", names: frozenset[str] | None = None) -> None:
        """Walk from here. `names` are those in the code that reaches it, None where it is itself what is called."""
        kind = type(thing)  # never `isinstance`, which may ask the object
        if kind in ATOMS or id(thing) in self._seen or self._depth > _MOST_DEPTH:
            return
        self._seen.add(id(thing))
        self._depth += 1
        self._visit(thing, kind, label, names)
        self._depth -= 1

    def _visit(self, thing: Any, kind: type, label: str, names: frozenset[str] | None) -> None:
        if issubclass(kind, torch.Tensor):
            self.on_tensor(thing, label)
        elif issubclass(kind, nn.Module):
            self.on_module(thing, label or kind.__name__, self._find_in_methods(kind, names, "forward"))
        elif issubclass(kind, GENERATORS):
            self.on_generator(thing)
        elif issubclass(kind, tuple):
            for part in thing[:_MOST_ENTRIES]:
                self.find(part, label, names)
        elif issubclass(kind, CONTAINERS):
            self.on_container(thing, label)
            for key, part in _entries(thing):
                self.find(part, f"{label}[{key!r}]" if type(key) in (int, str) else label, names)
        elif issubclass(kind, np.ndarray):
            self.on_array(thing)
        elif kind is functools.partial:
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self.find(part, label, names)
        elif kind is types.MethodType:
            own = frozenset({thing.__name__})
            # A module of which `forward` is called is called itself, without its hooks.
            calls = names is None and thing.__name__ == "forward" and isinstance(thing.__self__, nn.Module)
            self.find(thing.__self__, label, None if calls else own if names is None else names | own)
            self.find(thing.__func__, label, names)
        elif kind is types.BuiltinFunctionType:
            self.find(thing.__self__, label, names)  # `history.append`; a module's functions have the module here
        elif kind is types.FunctionType:
            if not is_foreign(thing.__module__):
                self.on_function()
                self._find_in_function(thing)
        elif _is_users_object(kind):
            path = label or kind.__name__
            names = self._find_in_methods(kind, names, "__call__")
            self.on_object(thing, path)
            for name, slot in _attributes(thing, path):
                if slot is not None:
                    self.on_slot(slot)
                self.find(vars(thing)[name] if slot is None else slot.get(), f"{path}.{name}", names)

    def _find_in_methods(self, kind: type, names: frozenset[str] | None, called: str) -> frozenset[str] | None:
        """Walk what the methods use that can be called; returns the names in their code too."""
        methods, known = _methods(kind, names, called)
        for method in methods:
            if id(method) not in self._seen:
                self._seen.add(id(method))
                self._find_in_function(method)
        return known

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
            if name not in space:
                continue
            value = space[name]
            if type(value) not in _CODE:
                self.on_global(Entry(space, name, name, in_module=False))
                self.find(value, name, code.names)
            elif type(value) is types.FunctionType:
                self.find(value, name)
        for name in code.stores:
            self.on_global(Entry(space, name, name, in_module=False))


@dataclass(frozen=True, slots=True, eq=False)
class FoundModule:
    """A module within reach, and what messages call it."""

    module: nn.Module
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class FoundObject:
    """An object of a class of the user's own, and what messages call it."""

    thing: Any
    label: str


class Finds(Reach):
    """What is within reach of `roots`, to be read when the walk is over."""

    __slots__ = ("generators", "holders", "tensors")

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__()
        self.holders: list[FoundModule | FoundObject | Variable] = []  # where state may be, in the order of the walk
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        for root in roots:
            self.find(root)

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """Keep it; what is inside is for whoever reads."""
        self.holders.append(FoundModule(module, label))

    def on_object(self, thing: Any, label: str) -> None:
        """Keep it."""
        self.holders.append(FoundObject(thing, label))

    def on_variable(self, slot: Variable) -> None:
        """Keep it."""
        self.holders.append(slot)

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """Keep it."""
        self.tensors.append(tensor)

    def on_generator(self, generator: Any) -> None:
        """Keep it."""
        self.generators.append(generator)


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
            if len(cls._known) > _MOST_CODES:  # code that is made anew all the time
                cls._known.clear()
            known = cls._known[id(code)] = cls._read(code)
        return known

    @classmethod
    def _read(cls, code: types.CodeType) -> _Code:
        loads: dict[str, None] = {}
        stores: dict[str, None] = {}
        # A string may be a name too, as in `getattr(self, "head")`.
        names = {*code.co_names, *(text for text in code.co_consts if type(text) is str and text.isidentifier())}
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
    # As they are stored: some dictionaries make something of an entry whenever they are asked.
    pairs = dict.items(container) if isinstance(container, dict) else enumerate(container)
    return islice(pairs, _MOST_ENTRIES)


@functools.cache
def is_foreign(module_name: str | None) -> bool:
    """Whether a module of this name is one of torch's, numpy's or Python's own."""
    top = (module_name or "").partition(".")[0]
    if top not in sys.stdlib_module_names or top == "__main__":
        return top in _FOREIGN
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or file.startswith(_STDLIB)  # somebody's own `trace.py` is not


def _is_users_object(kind: type) -> bool:
    """A class of the user's own whose instances can keep attributes."""
    if kind in _NAMESPACES:
        return True
    return not is_foreign(kind.__module__) and (kind.__dictoffset__ != 0 or hasattr(kind, "__slots__"))


@functools.lru_cache(maxsize=4096)
def _methods(
    kind: type, names: frozenset[str] | None, called: str
) -> tuple[tuple[types.FunctionType, ...], frozenset[str] | None]:
    """Methods that code with these names can call, and those they call, and all names in them.

    Without names it is the object itself that is called. Torch's own methods are not among them, but the names are:
    attention, for one, reads the weights of a layer that it does not call.
    """
    found: dict[types.FunctionType, frozenset[str]] = {}
    pending = [called, *(names or ())]
    seen = set(pending)
    while pending:
        name = pending.pop()
        for owner in kind.__mro__:
            method = owner.__dict__.get(name)
            if type(method) is types.FunctionType and owner is not nn.Module:
                found[method] = inside = _Code.of(method.__code__).names
                pending += inside - seen
                seen |= inside
                if "super" in inside:
                    continue
            if method is not None:
                break
    own = tuple(method for method in found if not is_foreign(method.__module__))
    return own, None if names is None else names.union(*found.values())


def has_method(kind: type, names: frozenset[str]) -> bool:
    """Whether code with these names can call a method of the class, other than by calling its instance."""
    return bool(_methods(kind, names, "")[0])


def names_in(kind: type, names: frozenset[str]) -> frozenset[str]:
    """The names with those in the methods of the class that code with them can call."""
    return _methods(kind, names, "")[1] or names


def names_for(function: Any) -> frozenset[str] | None:
    """The names in a function's code, for what it is given; None if it may be taken to call that."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is not types.FunctionType:
        return frozenset()
    if is_foreign(function.__module__) or function.__name__ == "forward":
        return None
    return _Code.of(function.__code__).names


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """An attribute that a class has a slot for."""

    owner: Any
    descriptor: types.MemberDescriptorType
    label: str
    in_module: bool = False

    def get(self) -> Any:
        """See `Slot`."""
        try:
            return self.descriptor.__get__(self.owner)
        except AttributeError:  # not set yet
            return MISSING

    def set(self, value: Any) -> None:
        """See `Slot`."""
        if value is not MISSING:
            self.descriptor.__set__(self.owner, value)
        elif self.get() is not MISSING:
            self.descriptor.__delete__(self.owner)


def _attributes(thing: Any, path: str) -> Iterator[tuple[str, Member | None]]:
    """Names of an object's attributes, with the slot of those that have one; no code of the user's is run."""
    if type(thing).__dictoffset__:
        for name in list(vars(thing)):
            yield name, None
    for kind in type(thing).__mro__:
        for name, descriptor in kind.__dict__.items() if "__slots__" in kind.__dict__ else ():
            if type(descriptor) is types.MemberDescriptorType:
                yield name, Member(thing, descriptor, f"{path}.{name}")
