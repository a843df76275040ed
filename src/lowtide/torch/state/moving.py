"""Things outside that move while a step runs: counters, schedules, iterators that it names or closes over.

A loop differentiates the graphs of reruns, and such a thing can change a graph without changing any value: where to
detach, the slope of a surrogate. So the small things that a step can see are looked at before and after its first
runs: numbers, small containers and arrays, iterators; in plain objects, and in classes, one or two levels down. Where
one moves, and only there, graphs of first runs and reruns are compared (`graph_of`). That something moves is no fault
by itself: a progress bar does.
"""

from __future__ import annotations

import contextvars
import io
import random
import threading
import types
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from lowtide.torch.state.finding import Finds, named_by, names_in
from lowtide.torch.state.structure import MODULE_INTERNALS, is_foreign, is_iterator, is_plain_object, slots_of

_NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})
_COUNTERS = frozenset({bool, int, float})
_MOST_ENTRIES = 1000  # of a container whose numbers are looked at; of a longer one, its length
_MOST_BYTES = 1024  # of an array
# Whoever names one of these may read what somebody writes meanwhile.
_OUTSIDE = frozenset({"open", "environ", "getenv", "read_text", "readline"})
_REPEATED = (*_NUMBERS, nn.Module, torch.Tensor, list, tuple, dict, set, deque, np.ndarray, array, bytearray, type)
_ALWAYS: Any = object()  # what cannot be looked at without changing it, and is taken to move

Look = dict[str, Any]


class Things:
    """The small things that functions and the classes of modules can see."""

    __slots__ = ("_finds", "_kinds", "_modules")

    def __init__(self, finds: Finds, modules: Iterable[nn.Module]) -> None:
        self._finds = finds
        self._modules = list(modules)
        kinds = {kind for module in self._modules for kind in type(module).__mro__ if not is_foreign(kind.__module__)}
        self._kinds = [*kinds, *{type(thing) for thing in finds.objects}]

    def values(self) -> Iterator[tuple[str, Any]]:
        """Names and values of what the functions name, and of attributes one level down."""
        for function in self._finds.functions:
            for name, value in named_by(function):
                yield from _within(name, value, function)
            yield from _entries(function.__name__, vars(function))
        for name, value in (*self._finds.held, *self._not_repeated()):
            yield from _within(name, value, None)
        for kind in self._kinds:
            yield from _entries(kind.__name__, vars(kind))
        for thing in self._finds.objects:  # numbers and tensors of it are repeated, its containers are not
            repeated = (*_NUMBERS, torch.Tensor)
            own = {key: part for key, part in _own_attributes(thing).items() if not isinstance(part, repeated)}
            yield from _entries("self", own)

    def _not_repeated(self) -> Iterator[tuple[str, Any]]:
        """What modules have that is none of the kinds which are repeated for a rerun: files, schedulers, and so on."""
        for module in self._modules:
            for name, value in list(vars(module).items()):
                repeated = isinstance(value, _REPEATED) or is_iterator(value) or is_plain_object(type(value))
                if name not in MODULE_INTERNALS and not repeated:
                    yield f"{type(module).__name__}.{name}", value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the values that are tensors or have tensors in them, with each of these."""
        return ((name, part) for name, value in self.values() for part in _tensors_in(value))

    def look(self) -> Look:
        """What can be seen of them now, by name."""
        seen: Look = {"random": random.getstate()[1][-1], "np.random": _numpy_position()}
        for function in self._finds.functions:
            if _OUTSIDE.intersection(names_in(function.__code__)):
                seen[f"what {function.__name__} reads"] = _ALWAYS
        for name, value in self.values():
            sign = _sign_of(value)
            if sign is not None:
                seen[name] = sign
        return seen

    def put_back(self, before: Look) -> list[str]:
        """Put back numbers that have moved since a look; returns the names of other things that have."""
        for function in self._finds.functions:
            _put_back_variables(function, before)
            for name, value in named_by(function):
                attributes = {} if isinstance(value, type | types.ModuleType) else getattr(value, "__dict__", {})
                for key, part in list(attributes.items()):
                    if _is_count(part) and _is_count(before.get(f"{name}.{key}")):
                        attributes[key] = before[f"{name}.{key}"]
        now = self.look()
        # What was None is a cache that is filled now, and iterators may or may not have moved.
        harmless = (_ALWAYS, repr(None))
        return [
            name for name in moved(before, now) if now.get(name) is not _ALWAYS and before.get(name) not in harmless
        ]


def _put_back_variables(function: types.FunctionType, before: Look) -> None:
    """Put back numbers in variables that a function closes over, and in globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not bound
            if _is_count(cell.cell_contents) and _is_count(before.get(name)):
                cell.cell_contents = before[name]
    space = function.__globals__
    for name in names_in(function.__code__):
        if _is_count(space.get(name)) and _is_count(before.get(name)):
            space[name] = before[name]


def _is_count(value: Any) -> bool:
    return type(value) in _COUNTERS


def _within(name: str, value: Any, function: types.FunctionType | None) -> Iterator[tuple[str, Any]]:
    """A value and its attributes, two levels down where these are plain objects."""
    if type(value) in weakref.ProxyTypes:  # to look at one may fail
        return
    yield name, value
    for path, part in _entries(name, _attributes_of(value, function)):
        yield path, part
        if is_plain_object(type(part)):
            yield from _entries(path, _own_attributes(part))


def _entries(name: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    own = ((key, part) for key, part in list(entries.items()) if not key.startswith("__"))
    return ((f"{name}.{key}", part) for key, part in own if type(part) not in weakref.ProxyTypes)


def _own_attributes(thing: Any) -> dict[str, Any]:
    slots = {slot.__name__: getattr(thing, slot.__name__, None) for slot in slots_of(thing)}
    return {**getattr(thing, "__dict__", {}), **slots}


def _attributes_of(value: Any, function: types.FunctionType | None) -> Mapping[str, Any]:
    """The attributes, one level down, of something that a function names, if they are anybody's to move."""
    if isinstance(value, types.ModuleType):
        named = set() if function is None else set(names_in(function.__code__))
        return {} if is_foreign(value.__name__) else {key: p for key, p in vars(value).items() if key in named}
    if isinstance(value, type):
        return {} if is_foreign(value.__module__) else vars(value)
    if isinstance(value, nn.Module | torch.Tensor | types.FunctionType | types.MethodType):
        return {}  # modules are repeated, functions have been found, and what becomes of a tensor shows in values
    if isinstance(value, threading.local | torch.optim.lr_scheduler.LRScheduler):
        return vars(value)
    if is_foreign(type(value).__module__) and not is_plain_object(type(value)):
        return {}
    kind = type(value)
    return {**({} if is_foreign(kind.__module__) else vars(kind)), **_own_attributes(value)}


def moved(before: Look, after: Look) -> list[str]:
    """The names of things that are not as they were, or cannot be told."""
    names = [name for name in after if name not in before or after[name] is _ALWAYS or before[name] != after[name]]
    return names + [name for name in before if name not in after]


def _numpy_position() -> Any:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (it is this one that is looked at)
    return state["state"].get("pos"), state.get("gauss")


def _sign_of(value: Any) -> Any:
    """Something that is another when the value has moved; None for what is not small or not looked at."""
    kind = type(value)
    if kind in _NUMBERS:
        return value if value is not None and value == value else repr(value)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray | array | bytearray):
        return _bytes_of(value)
    if isinstance(value, list | tuple | set | deque | dict | Mapping):
        return _sign_of_container(value)
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, contextvars.ContextVar):
        return _sign_of(value.get(None))
    return _ALWAYS if isinstance(value, io.IOBase | Iterator) else None


def _bytes_of(array_: Any) -> bytes | None:
    view = memoryview(array_)
    return view.tobytes() if view.nbytes <= _MOST_BYTES and view.format != "O" else None


def _sign_of_container(value: Any) -> Any:
    if isinstance(value, set) or not value:
        return len(value)
    if isinstance(value, Mapping) and not isinstance(value, dict):  # a weak dictionary, a `UserDict`
        value = dict(value.items())
    if len(value) > _MOST_ENTRIES:
        return (len(value), *(repr(value[k]) for k in (0, -1))) if isinstance(value, list | deque) else len(value)
    entries = list(dict.values(value)) if isinstance(value, dict) else list(value)
    return len(value), *(part if type(part) in _NUMBERS else id(part) for part in entries)


def warn_of_moved(things: Things, before: Look) -> None:
    """After runs for the sake of measuring: put back numbers that they moved, and warn of what cannot be put back."""
    if names := things.put_back(before):
        warnings.warn(
            f"planning ran the function, and with it moved {', '.join(names)}, outside its modules and arguments, "
            "where it stays moved; plan before such things matter, or make them part of a module or of the arguments",
            stacklevel=3,
        )


# --- tensors with a gradient that are put outside


def collected(things: Things, since: int) -> list[str]:
    """Names of what a step has put tensors of its graph into, since the mark: gradients through them would be lost."""
    made = (name for name, t in things.tensors() if t.grad_fn is not None and t.grad_fn._sequence_nr() >= since)
    return list(dict.fromkeys(made))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | deque | dict):
        entries = list(dict.values(value)) if isinstance(value, dict) else list(value)
        yield from (part for part in entries[-_MOST_ENTRIES:] if isinstance(part, torch.Tensor))


# --- the graph of a step

Graph = tuple[Any, ...]


def graph_of(results: Iterable[GradientEdge | None], ends: set[GradientEdge], since: int) -> Graph:
    """What tells the graph of a step: its nodes and how they follow on each other, with the numbers in custom ones.

    Args:
        results: where gradients enter; None where none does.
        ends: where they come out.
        since: the sequence number from which on nodes are the step's own.
    """
    numbers: dict[Node, int] = {}
    order: list[tuple[Node, Any]] = []
    roots = list(results)
    stack = [edge.node for edge in reversed(roots) if edge is not None and edge not in ends]
    while stack:
        node = stack.pop()
        if node not in numbers:
            numbers[node] = len(order)
            below = node.next_functions if node._sequence_nr() >= since else ()
            order.append((node, below))
            stack += [b for b, k in reversed(below) if b is not None and GradientEdge(b, k) not in ends]

    def number(node: Node | None, k: int) -> int | None:
        return None if node is None else -1 if GradientEdge(node, k) in ends else numbers[node]

    rows = [(_name_of(node), _numbers_of(node), tuple(number(b, k) for b, k in below)) for node, below in order]
    return (*(None if edge is None else number(edge.node, edge.output_nr) for edge in roots), *rows)


def _name_of(node: Node) -> str:
    name = node.name()
    return "reshape" if name in _VIEWS else name


# A reshape leaves one or the other of these, depending on who watches.
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})


def _numbers_of(node: Any) -> tuple[Any, ...]:
    """Numbers that an operation was given, or a custom Function has put into its context."""
    attributes = getattr(node, "__dict__", None)
    if attributes is not None:
        return tuple((name, repr(value)) for name, value in attributes.items() if type(value) in _NUMBERS)
    own = []
    for name in _saved_by(type(node)):
        raw = getattr(node, f"_raw{name}", None)
        if raw is None or getattr(raw, "unpack_hook", None) is None:  # else to look would run somebody's hook
            try:
                value = getattr(node, name)
            except RuntimeError:  # a tensor that was changed in place since: the backward will say so
                continue
            if type(value) in _NUMBERS or (isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu):
                own.append((name.removeprefix("_saved_"), repr(value)))
    return tuple(own)


_saved_names: dict[type, tuple[str, ...]] = {}  # by torch's own classes of nodes


def _saved_by(kind: type) -> tuple[str, ...]:
    """The names under which an operation's node has what it saved."""
    if kind not in _saved_names:
        _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_saved_"))
    return _saved_names[kind]
