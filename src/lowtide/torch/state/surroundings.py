"""What a function can see beside its arguments: what takes part with it, what moves while it runs, what grows.

Modules, objects whose methods are called, generators and other functions are found where a function says so itself:
what it is bound to, closes over, has for defaults, is given by a `partial`, or names among its globals; in containers
among these, and in the attributes of plain objects, one level down. Modules that a function comes by in other ways are
met when they are called.

What is not in modules or arguments is the user's: it is neither followed nor put back. But the small things among it
are looked at before and after the first runs of a loop's step: numbers, small containers and arrays, iterators. A loop
differentiates the graphs of reruns, and such a thing can change a graph without changing any value: where to detach,
the slope of a surrogate. Where one moves, and only there, graphs are compared. That something moves is no fault by
itself: a progress bar does. And a list that a function collects in grows again in a rerun, of which the user is told.
"""

from __future__ import annotations

import contextvars
import functools
import io
import queue
import random
import threading
import types
import warnings
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.torch.state.generators import KINDS as GENERATORS
from lowtide.torch.state.notes import may_be_copied
from lowtide.torch.state.samples import sample_of
from lowtide.torch.state.structure import (
    MODULE_INTERNALS,
    NUMBERS,
    attributes_of,
    is_foreign,
    is_installed,
    is_iterator,
    is_plain_object,
)

_MOST_DEPTH = 8  # of functions that name functions
_MOST_FOUND = 100  # of a container that are looked at
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(types.BuiltinMethodType, types.MethodWrapperType),  # of an object of C, such as `counter.__next__`
)

_FOUND = (nn.Module, *GENERATORS, *FUNCTIONS)


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

    __slots__ = ("_methods", "_names", "_seen", "functions", "generators", "held", "labels", "modules", "objects")

    def __init__(self, things: Iterable[Any] = ()) -> None:
        self._seen: set[int] = set()
        self._names: set[str] = set()  # in the code of functions
        self._methods: dict[str, list[types.FunctionType]] = {}  # that no function was seen to name so far
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
                self._add(function)
                for name, value in named_by(function):
                    self.labels.setdefault(id(value), name)
                    self._find_held(value, depth, function)
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
        self._add_methods(type(module))

    def _add(self, function: types.FunctionType) -> None:
        """Add a function that may be called, and with it methods of the names in its code."""
        self.functions.append(function)
        for name in set(names_in(function.__code__)) - self._names:
            self._names.add(name)
            for method in self._methods.pop(name, ()):
                self._add(method)

    def _add_methods(self, kind: type) -> None:
        """Add methods that may be called; modules that they name take part only if they are called."""
        for name, value in _class_attributes(kind).items():
            method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(method, types.FunctionType) and id(method) not in self._seen:
                self._seen.add(id(method))
                if name in self._names or (name.startswith("__") and name != "__init__"):
                    self._add(method)
                else:
                    self._methods.setdefault(name, []).append(method)

    def _find_owner(self, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            self.find(owner)
        elif is_plain_object(type(owner)) and not any(owner is known for known in self.objects):
            self.objects.append(owner)
            self._find_in_attributes(owner)

    def _find_held(self, value: Any, depth: int, function: types.FunctionType | None = None) -> None:
        """Look at something that a function holds."""
        if type(value) in weakref.ProxyTypes:  # to look at one may fail
            return
        if isinstance(value, list | tuple | deque | dict):
            parts = _first_of(value)
        elif isinstance(value, types.ModuleType):
            parts = list(_visible_in(value, function).values())
        else:
            parts = [value]
        for part in parts:
            if isinstance(part, _FOUND):
                self.find(part, depth + 1)
        if isinstance(value, type):
            self._add_methods(value)
        elif is_plain_object(type(value)):  # the user's own, but for the modules and generators that it has
            self._find_in_attributes(value)
            self._add_methods(type(value))

    def _find_in_attributes(self, thing: Any) -> None:
        for value in _first_of(getattr(thing, "__dict__", {})):
            for part in (value, *(_first_of(value) if isinstance(value, list | tuple | dict) else ())):
                if isinstance(part, _FOUND):
                    self.find(part)


def _first_of(container: Any) -> list[Any]:
    """The first entries of a container, without proxies: to look at one of these may fail."""
    entries = dict.values(container) if isinstance(container, dict) else container
    return [part for part in islice(entries, _MOST_FOUND) if type(part) not in weakref.ProxyTypes]


def named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function closes over, has for defaults, and names among its globals."""
    yield from bound_in(function)
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def bound_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function closes over and has for defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default argument of {function.__name__}", default


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function's code, and in that of functions made inside."""
    names = dict.fromkeys(filter(str.isidentifier, code.co_names))  # pytest puts others there
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(dict.fromkeys(names_in(inner)))
    return tuple(names)


# --- things that move

_COUNTERS = frozenset({bool, int, float})
# Of a container whose entries are looked at, by how deep it is inside others; of a longer one, its length and its ends.
_MOST_ENTRIES = (1000, 50, 20, 10)
_MOST_BYTES = 64 * 1024  # of an array
# Whoever names one of these may read what somebody writes meanwhile.
_OUTSIDE = frozenset({"open", "environ", "getenv", "read_text", "read_bytes", "readline", "read", "load", "execute"})
_REPEATED = (
    *NUMBERS,
    nn.Module,
    torch.Tensor,
    list,
    tuple,
    dict,
    set,
    deque,
    np.ndarray,
    array,
    bytearray,
    type,
)
# Of the standard library and of torch, and with state in their attributes.
_STANDARD = (
    *(threading.local, threading.Semaphore, queue.Queue),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)
_ALWAYS: Any = object()  # what cannot be looked at without changing it, and is taken to move

Look = dict[str, Any]


_named_generators: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, ...]] = weakref.WeakKeyDictionary()


def generators_named_in(kind: type[nn.Module]) -> tuple[Any, ...]:
    """The generators among the globals that a module's `forward` names."""
    known = _named_generators.get(kind)
    if known is None:
        forward = kind.forward
        is_users = isinstance(forward, types.FunctionType) and not is_foreign(forward.__module__)
        named = [thing for _, thing in named_by(forward)] if is_users else []  # type: ignore[arg-type]  # a function
        known = _named_generators[kind] = tuple(thing for thing in named if isinstance(thing, GENERATORS))
    return known


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
            repeated = (*NUMBERS, torch.Tensor)
            own = {key: part for key, part in attributes_of(thing).items() if not isinstance(part, repeated)}
            yield from _entries("self", own)

    def _not_repeated(self) -> Iterator[tuple[str, Any]]:
        """What modules have that is none of the kinds which are repeated for a rerun: files, schedulers, and so on."""
        for module in self._modules:
            for name, value in list(vars(module).items()):
                if name in MODULE_INTERNALS or isinstance(value, _REPEATED) or is_iterator(value):
                    continue
                # A plain object is repeated, but for what its class has.
                yield f"{type(module).__name__}.{name}", type(value) if is_plain_object(type(value)) else value

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the values that are tensors or have tensors in them, with each of these."""
        return ((name, part) for name, value in self.values() for part in _tensors_in(value))

    def counts(self) -> dict[str, Any]:
        """Numbers of the user's own among them, by name: not those of a progress bar's class that is installed."""
        found: dict[str, Any] = {}
        theirs: tuple[str, ...] = ()
        for name, value in self.values():
            if is_installed(type(value).__module__) and not isinstance(value, _ARRAYS):
                theirs += (f"{name}.",)
            elif not name.startswith(theirs):
                found.update(_counts_in(name, value))
        return found

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


_ARRAYS = (np.ndarray, torch.Tensor)
_TABLES = frozenset({dict, list, defaultdict, Counter, OrderedDict})


def _counts_in(name: str, value: Any) -> dict[str, Any]:
    """A number, or the whole ones in a small container or array, by name; others there are the latest of something."""
    if isinstance(value, _ARRAYS):
        return {name: repr(value.tolist())} if _is_counter(value) else {}  # as text, where even nan is itself
    if type(value) in _TABLES and len(value) <= _MOST_FOUND:
        entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        return {f"{name}[{key!r}]": part for key, part in entries if type(part) is int}
    return {name: value} if type(value) in (int, float) else {}


def _is_counter(array_: Any) -> bool:
    """Whether a tensor or an array of numpy's is one number, or a few whole ones, that can be read without waiting."""
    if isinstance(array_, torch.Tensor):
        if not array_.is_cpu or not may_be_copied(array_):
            return False
        is_whole, size = not (array_.is_floating_point() or array_.is_complex()), array_.numel()
    else:
        is_whole, size = array_.dtype.kind in "iu", array_.size if array_.dtype.kind in "iuf" else 0
    return size == 1 or (is_whole and size <= _MOST_FOUND)


def _is_count(value: Any) -> bool:
    return type(value) in _COUNTERS


def _within(name: str, value: Any, function: types.FunctionType | None) -> Iterator[tuple[str, Any]]:
    """A value and its attributes, two levels down where these are plain objects."""
    if type(value) in weakref.ProxyTypes:  # to look at one may fail
        return
    yield name, value
    for path, part in _entries(name, _visible_in(value, function)):
        yield path, part
        if is_plain_object(type(part)):
            yield from _entries(path, attributes_of(part))


def _entries(name: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    own = ((key, part) for key, part in list(entries.items()) if not key.startswith("__"))
    return ((f"{name}.{key}", part) for key, part in own if type(part) not in weakref.ProxyTypes)


def _visible_in(value: Any, function: types.FunctionType | None) -> Mapping[str, Any]:
    """The attributes, one level down, of something that a function names, if they are anybody's to move."""
    if isinstance(value, types.ModuleType):
        named = set() if function is None else set(names_in(function.__code__))
        return {} if is_foreign(value.__name__) else {key: p for key, p in vars(value).items() if key in named}
    if isinstance(value, nn.Module | torch.Tensor | types.FunctionType | types.MethodType):
        return {}  # modules are repeated, functions have been found, and what becomes of a tensor shows in values
    if isinstance(value, type):
        return {**_class_attributes(type(value)), **_class_attributes(value)}
    if isinstance(value, _STANDARD):
        return vars(value)
    if is_foreign(type(value).__module__) and not is_plain_object(type(value)):
        return {}
    return {**_class_attributes(type(value)), **attributes_of(value)}


def _class_attributes(kind: type) -> dict[str, Any]:
    """What a class has, and those that it inherits from, but for classes of torch's, numpy's and Python's own."""
    kinds = [base for base in reversed(type.mro(kind)) if not is_foreign(base.__module__)]
    return {name: value for base in kinds for name, value in vars(base).items()}


def moved(before: Look, after: Look) -> list[str]:
    """The names of things that are not as they were, or cannot be told; of a thing in a thing, the inner one's."""
    names = [name for name in after if name not in before or after[name] is _ALWAYS or before[name] != after[name]]
    names += [name for name in before if name not in after]
    outer = {name[:k] for name in names for k, letter in enumerate(name) if letter == "."}
    return [name for name in names if name not in outer]


def _numpy_position() -> Any:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (it is this one that is looked at)
    return state["state"].get("pos"), state.get("gauss")


def _sign_of(value: Any, depth: int = 0) -> Any:
    """Something that is another when the value has moved, or what is inside it."""
    kind = type(value)
    if kind in NUMBERS:
        return value if value is not None and value == value else repr(value)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray | array | bytearray | memoryview):
        return _bytes_of(value)
    if isinstance(value, torch.Tensor):
        sample = sample_of(value) if value.is_cpu else 0  # on a device, to read it would wait
        return _identity(value), 0 if value.is_inference() else value._version, sample
    if isinstance(value, contextvars.ContextVar):
        return _sign_of(value.get(None), depth)
    if isinstance(value, io.IOBase | Iterator | Coroutine):
        return _ALWAYS
    entries = _entries_of(value)
    return _identity(value) if entries is None else _sign_of_entries(entries, depth)


def _sign_of_entries(entries: list[Any], depth: int) -> Any:
    most = _MOST_ENTRIES[depth] if depth < len(_MOST_ENTRIES) else 0
    if len(entries) > most:
        ends = (entries[0], entries[-1]) if most else ()
        return len(entries), *(end if type(end) in NUMBERS else _identity(end) for end in ends)
    signs = [_sign_of(part, depth + 1) for part in entries if type(part) not in weakref.ProxyTypes]
    return _ALWAYS if any(sign is _ALWAYS for sign in signs) else (len(entries), *signs)


def _identity(value: Any) -> tuple[int, Any]:
    """What tells an object from all others, as long as it is kept: the number of one that is gone may be another's."""
    try:
        known: Any = weakref.ref(value)
    except TypeError:  # of a kind that cannot be referred to
        known = value
    return id(known), known


def _entries_of(value: Any) -> list[Any] | None:
    """What is inside a container or an object; None where there is nothing that is known."""
    if isinstance(value, Mapping) and is_foreign(type(value).__module__):  # somebody's own may read a file for each
        value = dict(dict.items(value) if isinstance(value, dict) else value.items())
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    keeps = isinstance(value, _STANDARD) or is_plain_object(type(value))
    return list(attributes_of(value).values()) if keeps else None


def _bytes_of(array_: Any) -> Any:
    view = memoryview(array_)
    if view.format == "O":
        return _sign_of(array_.tolist(), 1)
    return view.tobytes() if view.nbytes <= _MOST_BYTES else _identity(array_)


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
        yield from (part for part in entries[-_MOST_ENTRIES[0] :] if isinstance(part, torch.Tensor))


# --- what of the user's a rerun changes

_CONTAINERS = (list, dict, deque, set)

# What was looked at, by id, until it is gone: functions by their code, which a closure made anew has too.
_looked: dict[int, weakref.ref[Any]] = {}
_told: set[tuple[str, str]] = set()


def first_look(things: Sequence[Any], *, counts: bool) -> SideEffects | None:
    """What functions and modules that are about to run again may change; None if they were looked at before."""
    for thing in things:
        if id(_key_of(thing)) not in _looked:
            return SideEffects(*things, counts=counts)
    return None


class SideEffects:
    """How long the containers are that functions or modules can see, and, with `counts`, how far their counters."""

    def __init__(self, *things: Any, counts: bool) -> None:
        self._keys = [_key_of(thing) for thing in things]
        finds = Finds(things)
        self._things = Things(finds, [module for root in finds.modules for module in root.modules()])
        found = {id(value): (name, value) for name, value in self._things.values() if isinstance(value, _CONTAINERS)}
        self._lengths = [(name, value, len(value)) for name, value in found.values()]
        self._counts = self._things.counts() if counts else {}

    def tell(self) -> None:
        """Warn of what has grown or moved by now, and have these functions and modules looked at no more."""
        for key in self._keys:
            _remember(key)
        key = self._keys[0]
        function = getattr(key, "co_name", getattr(key, "__name__", type(key).__name__))
        for name, container, length in self._lengths:
            if len(container) > length:
                _warn_of_side_effect(f"`{name}` grew", function, "it has entries twice", _AS_AN_OUTPUT)
        now = self._things.counts() if self._counts else {}
        moved = [f"`{name}`" for name, then in self._counts.items() if now.get(name, then) != then]
        if moved:
            more = f" and {len(moved) - _MOST_NAMES:,} more" if len(moved) > _MOST_NAMES else ""
            names = ", ".join(moved[:_MOST_NAMES]) + more
            _warn_of_side_effect(f"{names} moved", function, "they go on further than in a plain run", _IN_A_MODULE)


_MOST_NAMES = 4
_AS_AN_OUTPUT = "return what is collected as an output of the function"
_IN_A_MODULE = "make the counter an attribute of a module, where it is put back"


def _warn_of_side_effect(what: str, function: str, so: str, instead: str) -> None:
    if (what, function) in _told:
        return
    _told.add((what, function))
    warnings.warn(
        f"{what} while `{function}` was recomputed for the backward: side effects run again in a recomputation, so "
        f"{so}. Guard them with `if not lt.is_recomputing():`, or {instead}",
        UserWarning,
        stacklevel=3,
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
