"""Containers of the user's that grow in a rerun, because a rerun runs side effects again.

A list that a function collects in, outside its modules and arguments, is not put back. Instead the user is told, once
and by name, that it has everything twice, and what to do about that. Looked at are the lists, dicts, deques and sets
among the things that a function can see (`moving.py`). That is done at the first rerun of a function, and costs nothing
later.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections import deque
from typing import Any

from torch import nn

from lowtide.torch.state.finding import Finds
from lowtide.torch.state.moving import Things

_CONTAINERS = (list, dict, deque, set)

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
        finds = Finds(things)
        modules = [module for root in finds.modules for module in root.modules()]
        found = {id(value): (name, value) for name, value in Things(finds, modules).values()}
        self._lengths = [(name, value, len(value)) for name, value in found.values() if isinstance(value, _CONTAINERS)]

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
