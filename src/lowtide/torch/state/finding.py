"""What a function has beside its arguments: modules, objects whose methods are called, generators, other functions.

They are found where a function says so itself: what it is bound to, closes over, has for defaults, is given by a
`partial`, or names among its globals; in containers among these, and in the attributes of plain objects, one level
down. Modules that a function comes by in other ways are met when they are called.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from lowtide.torch.state.generators import KINDS as GENERATORS
from lowtide.torch.state.structure import is_foreign, is_plain_object

_PROXIES = weakref.ProxyTypes
_MOST_DEPTH = 8  # of functions that name functions
_MOST_ENTRIES = 100  # of a container that are looked at
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(types.BuiltinMethodType, types.MethodWrapperType),  # of an object of C, such as `counter.__next__`
)


class Finds:
    """What is found in some things; each thing once.

    Attributes:
        modules: modules, but not those inside them.
        objects: objects of the user's whose method, or which themselves, are called.
        generators: random generators.
        functions: functions of the user's own that may be called.
        held: what a function of C is bound to, or a partial is given, with a name.
        labels: by identity, the names under which functions hold things.
    """

    __slots__ = ("_seen", "functions", "generators", "held", "labels", "modules", "objects")

    def __init__(self, things: Iterable[Any] = ()) -> None:
        self._seen: set[int] = set()
        self.modules: list[nn.Module] = []
        self.objects: list[Any] = []
        self.generators: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.held: list[tuple[str, Any]] = []
        self.labels: dict[int, str] = {}
        for thing in things:
            self.find(thing)

    def find(self, thing: Any, depth: int = 0) -> None:
        """Look at a function, a module, a generator, or an object that is called."""
        if id(thing) in self._seen or depth > _MOST_DEPTH:
            return
        self._seen.add(id(thing))
        if isinstance(thing, nn.Module):
            self.modules.append(thing)
            for module in thing.modules():
                self._find_in_module(module, depth)
        elif isinstance(thing, GENERATORS):
            self.generators.append(thing)
        elif isinstance(thing, FUNCTIONS):
            self._find_in_function(thing, depth)
        elif callable(thing):
            self._find_owner(thing)
            self.find(getattr(type(thing), "__call__"), depth + 1)  # noqa: B004, B009  (the method that is called)

    def _find_in_function(self, function: Any, depth: int) -> None:
        if isinstance(function, types.FunctionType):
            if not is_foreign(function.__module__):
                self.functions.append(function)
                for name, value in named_by(function):
                    self.labels.setdefault(id(value), name)
                    self._find_held(value, depth)
        elif isinstance(function, types.MethodType):
            self.find(function.__func__, depth + 1)
            self._find_owner(function.__self__)
        elif isinstance(function, functools.partial):
            self.find(function.func, depth + 1)
            given = {f"argument {k}": part for k, part in enumerate(function.args)} | function.keywords
            for name, part in given.items():
                self.held.append((name, part))
                self._find_held(part, depth)
        elif not isinstance(function.__self__, types.ModuleType):  # `counter.__next__`, `rows.pop`
            self.held.append((self.labels.get(id(function), function.__name__), function.__self__))

    def _find_in_module(self, module: nn.Module, depth: int) -> None:
        """Look for generators that a module has, and at what its `forward`, its hooks and its functions name."""
        if isinstance(module, torch.jit.ScriptModule):  # sees nothing of Python's
            return
        for value in vars(module).values():
            if isinstance(value, (*GENERATORS, *FUNCTIONS)):
                self.find(value, depth + 1)
        for function in (type(module).forward, *module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            self.find(function, depth + 1)
        for kind in type(module).__mro__:
            if not is_foreign(kind.__module__):
                self._add_methods(kind)

    def _add_methods(self, kind: type) -> None:
        """Add functions that `forward` may call; modules that they name take part only if they are called."""
        for value in list(vars(kind).values()):
            method = value.fget if isinstance(value, property) else value
            if isinstance(method, types.FunctionType) and id(method) not in self._seen:
                self._seen.add(id(method))
                self.functions.append(method)

    def _find_owner(self, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            self.find(owner)
        elif is_plain_object(type(owner)) and not any(owner is known for known in self.objects):
            self.objects.append(owner)
            self._find_in_attributes(owner)

    def _find_held(self, value: Any, depth: int) -> None:
        """Look at something that a function holds."""
        if type(value) in _PROXIES:  # to look at one may fail
            return
        if isinstance(value, (nn.Module, *GENERATORS, *FUNCTIONS)):
            self.find(value, depth + 1)
        elif isinstance(value, list | tuple | deque | dict):
            for part in _first_of(value):
                if isinstance(part, (nn.Module, *GENERATORS, *FUNCTIONS)):
                    self.find(part, depth + 1)
        elif is_plain_object(type(value)):  # the user's own, but for the modules and generators that it has
            self._find_in_attributes(value)

    def _find_in_attributes(self, thing: Any) -> None:
        for value in _first_of(getattr(thing, "__dict__", {})):
            for part in (value, *(_first_of(value) if isinstance(value, list | tuple | dict) else ())):
                if isinstance(part, (nn.Module, *GENERATORS)):
                    self.find(part)


def _first_of(container: Any) -> list[Any]:
    """The first entries of a container, without proxies: to look at one of these may fail."""
    entries = dict.values(container) if isinstance(container, dict) else container
    return [part for part in islice(entries, _MOST_ENTRIES) if type(part) not in _PROXIES]


def named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function closes over, has for defaults, and names among its globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default argument of {function.__name__}", default
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in that of functions made inside."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(names_in(inner)))
    return tuple(names)
