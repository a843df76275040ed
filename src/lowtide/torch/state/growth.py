"""Containers of the user's that grow in a rerun, because a rerun runs side effects again.

A list that a function collects in, outside its modules and arguments, is not put back. Instead the user is told, once
and by name, that it has everything twice, and what to do about that. Looked at are lists, dicts, deques and sets that a
function closes over or names among its globals, and those that plain objects there have for attributes; of modules
what their `forward` and their hooks have. That is done at the first rerun of a function, and costs nothing later.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.torch.state.arguments import ATOMS, is_foreign, is_plain_object

_CONTAINERS = (list, dict, deque, set)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)
_MOST_DEPTH = 3  # of functions in each other's closures
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

# What was looked at, by id, until it is gone: functions by their code, which a closure made anew has too.
_looked: dict[int, weakref.ref[Any]] = {}
_suspected: set[tuple[int, str]] = set()  # containers that another thread may have made longer
_told: set[tuple[str, str]] = set()


def first_look(*things: Any) -> Growth | None:
    """Lengths of the containers of functions and modules about to run again; None if they were looked at before."""
    for thing in things:
        if id(_key_of(thing)) not in _looked:
            return Growth(*things)
    return None


class Growth:
    """How long the containers are that functions or modules can see."""

    def __init__(self, *things: Any) -> None:
        self._keys = [_key_of(thing) for thing in things]
        seen: set[int] = set()
        found = [pair for thing in things for pair in _containers_of(thing, 0, seen)]
        self._lengths = [(name, container, len(container)) for name, container in found]

    def grown(self) -> list[tuple[str, Any]]:
        """Containers that are longer by now, with their names."""
        return [(name, container) for name, container, length in self._lengths if len(container) > length]

    def tell(self) -> None:
        """Warn of containers that are longer by now, and have these functions and modules looked at no more.

        Where other threads run, one of them may have made it longer: then it is told if it happens again.
        """
        names, first = [name for name, _ in self.grown()], id(self._keys[0])
        if threading.active_count() > 1 and (new := {(first, name) for name in names} - _suspected):
            _suspected.update(new)
            return
        for key in self._keys:
            _remember(key)
        for name in names:
            warn_of_growth(name, getattr(self._keys[0], "co_name", type(self._keys[0]).__name__))


def warn_of_growth(name: str, function: str) -> None:
    """Warn, once, that a container grew while a function was run again."""
    if (name, function) in _told:
        return
    _told.add((name, function))
    warnings.warn(
        f"`{name}` grew while `{function}` was recomputed for the backward: side effects run again in a recomputation, "
        "so it has entries twice. Guard them with `if not lt.is_recomputing():`, or return what is collected as an "
        "output of the function",
        UserWarning,
        stacklevel=2,
    )


def _key_of(thing: Any) -> Any:
    if type(thing) is types.FunctionType:
        return thing.__code__
    if type(thing) is types.MethodType:
        return thing.__self__ if isinstance(thing.__self__, nn.Module) else thing.__func__
    return _key_of(thing.func) if isinstance(thing, functools.partial) else thing


def _remember(key: Any) -> None:
    number, forget = id(key), _looked.pop  # what is referred to may outlive our names
    try:
        _looked[number] = weakref.ref(key, lambda _: forget(number, None))
    except TypeError:  # of a kind that cannot be referred to, such as a function of C
        _looked[number] = lambda: key  # type: ignore[assignment]  # kept for good: there are few


def _containers_of(thing: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The containers that a function or a module can see, with their names."""
    if id(thing) in seen or depth > _MOST_DEPTH:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.jit.ScriptModule):  # sees nothing of Python's
        return
    if isinstance(thing, nn.Module):
        hooks = [hook for name in _HOOKS for hook in vars(thing)[name].values()]
        for inside in (type(thing).forward, *hooks):
            yield from _containers_of(inside, depth + 1, seen)
        for child in thing.children():
            yield from _containers_of(child, depth, seen)
    elif isinstance(thing, functools.partial):
        yield from _containers_of(thing.func, depth + 1, seen)
        yield from _containers_in(((f"argument {k}", value) for k, value in enumerate(thing.args)), depth, seen)
        yield from _containers_in(thing.keywords.items(), depth, seen)
    elif isinstance(thing, types.MethodType):
        yield from _containers_in([("self", thing.__self__)], depth, seen)
        yield from _containers_of(thing.__func__, depth + 1, seen)
    elif isinstance(thing, types.FunctionType) and not is_foreign(thing.__module__):
        yield from _containers_in(_names_of(thing), depth, seen)


def _names_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over or names among its globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _containers_in(named: Iterable[tuple[str, Any]], depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        if isinstance(value, _CONTAINERS):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value
        elif isinstance(value, types.BuiltinMethodType):  # `rows.append` under a name of its own
            yield from _containers_in([(name, value.__self__)], depth, seen)
        elif isinstance(value, (nn.Module, *_FUNCTIONS)):
            yield from _containers_of(value, depth + 1, seen)
        elif type(value) not in ATOMS and is_plain_object(type(value)) and id(value) not in seen:
            seen.add(id(value))
            attributes = getattr(value, "__dict__", {})
            rows = [(f"{name}.{key}", part) for key, part in attributes.items() if isinstance(part, _CONTAINERS)]
            yield from _containers_in(rows, depth, seen)
