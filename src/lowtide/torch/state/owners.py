"""Owners: modules, and objects whose methods are called, with everything in them as it was before a call.

A rerun finds them as the first run found them, and afterwards they are as they were before the rerun: buffers and
attributes change once, and a module that was switched to eval in between, or had the parameters of `functional_call`,
runs as it ran. A module takes part if it is called, or if the function is one of its methods, closes over it or names it
among its globals; and with it all that is inside: buffers, attributes, containers, plain objects, submodules. Objects of
torch's own classes are not followed, because FSDP keeps its state in them. Of an object of the user's whose method is
called, numbers, tensors, modules and generators are repeated; its containers are the user's, as is everything else that
a function can see: nothing of that is put back, and the samples that are compared show where it mattered.

It has to be quick, since it is done at every call: dictionaries are compared by the identity of their values, and what
modules without state look like is remembered.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_modules
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lowtide.errors import CheckpointError
from lowtide.torch.state.arguments import (
    ATOMS,
    GENERATORS,
    MOST_ENTRIES,
    holds_modules,
    is_foreign,
    is_iterator,
    is_plain_object,
    slots_of,
)
from lowtide.torch.state.notes import (
    SMALL,
    ArrayNote,
    ContentsNote,
    IteratorNote,
    MappingNote,
    ModuleNote,
    Note,
    NumbersNote,
    RowNote,
    SlotNote,
    VersionsNote,
    may_be_copied,
    needs_grad,
    same_entries,
)
from lowtide.torch.state.plain_modules import MODULE_INTERNALS, plain_modules

_ANY = float("inf")
_MOST_DEPTH = 8  # of containers and objects in each other
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OBJECTS = (*_HOOKS, "_modules", "_backward_hooks", "_backward_pre_hooks")
_NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_NOTHING: set[int] = set()


class _Known:
    """What is remembered of a module between calls."""

    __slots__ = ("attributes", "module", "steady", "training")

    def __init__(self, module: weakref.ref[nn.Module]) -> None:
        self.module = module
        self.training: bool | None = None
        self.attributes: dict[str, Any] = {}  # if they are plain values all: a copy that equal notes share
        self.steady: set[str] = set()  # buffers that a run in this mode was seen to leave alone


_known: dict[int, _Known] = {}


def _known_of(module: nn.Module) -> _Known:
    key = id(module)
    known = _known.get(key)
    if known is None or known.module() is not module:
        known = _known[key] = _Known(weakref.ref(module, lambda _: _known.pop(key, None)))
    return known


class Owners:
    """Notes of one call. Make it, `find_call`, run between `begin_meeting` and `end_meeting`, `finish`."""

    __slots__ = ("_called", "_hooked", "_notes", "_roots", "_seen", "follow", "is_lazy", "meets")

    def __init__(self, follow: Callable[[Any], None]) -> None:
        self.follow = follow  # is handed every random generator
        self.is_lazy = False  # whether a module in it has no parameters yet
        # Whether modules have to be met when they are called. All that is inside one that is itself called is known.
        self.meets = False
        self._hooked = False
        self._seen: set[int] = set()
        self._called: set[int] = set()  # modules whose parameters are watched
        self._notes: list[Note] = []
        self._roots: list[nn.Module] = []  # for messages

    # --- finding

    def find_call(self, function: Any, held: list[Any]) -> None:
        """Note what the function has, and what it is given; the calls around it note that too."""
        for owners in (self, *_meeting.owners):
            owners.find(function)
            for thing in held:
                owners.find(thing)

    def find(self, thing: Any, depth: int = 0) -> None:
        """Note a module, an object that is called or whose method is, or what a function closes over."""
        if id(thing) in self._seen or depth > _MOST_DEPTH:
            return
        if isinstance(thing, _FUNCTIONS):
            self._seen.add(id(thing))
            self.meets = True
            self._find_in_function(thing, depth)
        elif isinstance(thing, nn.Module):
            self._find_module(thing, is_called=depth == 0)
        elif isinstance(thing, GENERATORS):
            self._seen.add(id(thing))
            self.follow(thing)
        elif callable(thing) and is_plain_object(type(thing)):
            self.meets = True
            self._find_object(thing)

    def _find_module(self, module: nn.Module, *, is_called: bool) -> None:
        if id(module) not in self._seen:
            self._roots.append(module)
            self._take_part(module)
        if is_called and not self.is_lazy and id(module) not in self._called:
            self._watch_parameters(module)

    def _find_in_function(self, function: Any, depth: int) -> None:
        """What a function is bound to, closes over, has for defaults, or names among its globals."""
        if isinstance(function, functools.partial):
            held = [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, types.MethodType):
            held = [function.__func__]
            owner = function.__self__
            if isinstance(owner, nn.Module):
                calls = function.__name__ == "forward" and depth == 0  # a call of the module, without its hooks
                self._find_module(owner, is_called=calls)
            elif is_plain_object(type(owner)):
                self._find_object(owner)
        elif is_foreign(function.__module__):
            return
        else:
            held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            for cell in function.__closure__ or ():
                try:
                    held.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
            named = map(function.__globals__.get, function.__code__.co_names)
            held += [thing for thing in named if type(thing) not in ATOMS]
        for thing in held:
            if isinstance(thing, _FOLLOWED):
                self.find(thing, depth + 1)
            elif is_plain_object(type(thing)):  # the user's own, but for the modules and generators that it has
                for value in list(getattr(thing, "__dict__", {}).values()):
                    if isinstance(value, _HELD):
                        self.find(value, depth + 1)

    def _find_object(self, thing: Any) -> None:
        """An object of the user's whose method is called."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        attributes = getattr(thing, "__dict__", {})
        for descriptor in slots_of(thing):
            self._notes.append(SlotNote(thing, descriptor))
        plain = [name for name, value in attributes.items() if type(value) in _NUMBERS or _is_tensor(value)]
        self._notes.append(NumbersNote(attributes, plain))
        for value in list(attributes.values()):
            if _is_tensor(value):
                self._note_tensor(value, SMALL)
            elif isinstance(value, _HELD):
                self.find(value)

    # --- noting

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called."""
        self._find_module(module, is_called=True)

    def _watch_parameters(self, module: nn.Module) -> None:
        """Parameters of a module that is called, and of those inside, have to stay what they are."""
        if isinstance(module, torch.jit.ScriptModule):
            self._notes.append(VersionsNote(list(module.parameters())))
            return
        pending, owned = [module], []
        while pending:
            module = pending.pop()
            if id(module) not in self._called:
                self._called.add(id(module))
                owned += [p for p in module._parameters.values() if p is not None and _has_version(p)]
                pending += [child for child in module._modules.values() if child is not None]
        if owned:
            self._notes.append(VersionsNote(owned))

    def _take_part(self, module: nn.Module) -> None:
        """A module takes part with all that is inside, called or only read."""
        plain = plain_modules(module, _has_more_to_note)
        if plain is not None:
            self._notes.append(plain)
            self._seen.update(plain.ids)
            for inside in plain.with_tensors:
                self._note_module(inside)
            return
        pending = [module]
        while pending:
            module = pending.pop()
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self._note_anyhow(module)
            if not isinstance(module, torch.jit.ScriptModule):
                pending += [child for child in module._modules.values() if child is not None]

    def _note_anyhow(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # has no dictionaries of Python's
            for buffer in module.buffers():
                self._note_tensor(buffer, _ANY)
        # A lazy one becomes another module in its first run, and that is what the rerun has to see.
        elif isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            self.is_lazy = True
        elif not str(type(module).forward.__module__).startswith("torch.distributed"):  # a wrapper of theirs
            self._note_module(module)

    def _note_module(self, module: nn.Module) -> None:
        known, attributes = _known_of(module), module.__dict__
        if known.training is not module.training:
            known.training = module.training
            known.steady.clear()
        odd: list[str] = []
        if not same_entries(attributes, known.attributes):
            odd = [k for k, v in attributes.items() if k not in MODULE_INTERNALS and type(v) not in ATOMS]
            # What holds objects is not remembered: they may hold the module, which would then never be freed.
            known.attributes = {} if odd or any(attributes[name] for name in _OBJECTS) else dict(attributes)
        self._notes.append(ModuleNote(attributes, known.attributes or dict(attributes)))
        if "_is_fsdp_managed_module" in attributes:
            odd = [key for key in odd if not needs_grad(attributes[key])]
        for key in odd:
            self._note_value(attributes, key, attributes[key], 0, known)
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad and may_be_copied(parameter, SMALL):
                self._notes.append(ContentsNote(parameter, (known.steady, name)))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._note_tensor(buffer, SMALL if name in known.steady else _ANY, (known.steady, name))
        for generator in _generators_named_in(type(module)):
            self.find(generator)
        for name in _HOOKS:
            for hook in attributes[name].values():
                self.find(hook)
        if "parametrizations" in module._modules and id(parametrize) not in self._seen:
            self._seen.add(id(parametrize))  # inside `parametrize.cached` it has weights that were made before
            self._notes.append(NumbersNote(vars(parametrize), ["_cache_enabled", "_cache"]))
            self._notes.append(MappingNote(parametrize._cache))

    def _note_value(self, owner: Any, key: Any, value: Any, depth: int, known: _Known | None = None) -> None:
        """A value that a module has, by way of containers and plain objects."""
        if type(value) in ATOMS or id(value) in self._seen or depth > _MOST_DEPTH:
            return
        if isinstance(value, nn.Module):
            self._take_part(value)
        elif isinstance(value, torch.Tensor):
            steady = None if known is None else (known.steady, key)
            self._note_tensor(value, SMALL if known is None or key in known.steady else _ANY, steady)
        elif isinstance(value, GENERATORS):
            self.follow(value)
        elif is_iterator(value):
            self._notes.append(IteratorNote(owner, key, value))
        else:
            self._seen.add(id(value))
            self._note_contents(value, depth)

    def _note_contents(self, value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            for part in value:
                self._note_value(None, None, part, depth + 1)
        elif isinstance(value, list | dict | set | deque):
            if len(value) <= MOST_ENTRIES:
                self._notes.append(MappingNote(value) if isinstance(value, dict) else RowNote(value))
                for key, part in _entries(value):
                    self._note_value(value, key, part, depth + 1)
        elif isinstance(value, np.ndarray | array | bytearray):
            if memoryview(value).nbytes <= SMALL and not memoryview(value).readonly:
                self._notes.append(ArrayNote(value))
        elif is_plain_object(type(value)) and not holds_modules(value):
            for descriptor in slots_of(value):
                self._notes.append(SlotNote(value, descriptor))
            attributes = getattr(value, "__dict__", None)
            if attributes is not None:
                self._notes.append(MappingNote(attributes))
                for key, part in list(attributes.items()):
                    self._note_value(attributes, key, part, depth + 1)

    def _note_tensor(self, tensor: torch.Tensor, most: float, steady: tuple[set[str], str] | None = None) -> None:
        if may_be_copied(tensor, most):
            self._notes.append(ContentsNote(tensor, steady))
        elif _has_version(tensor):
            self._notes.append(VersionsNote([tensor]))

    # --- after the first run

    def finish(self) -> tuple[Owners | None, list[torch.Tensor]]:
        """Keep what a rerun needs; returns itself, unless nothing was found, and tensors to be kept with the arguments.

        Those are the ones that were taken out of their places: nobody else may hold them any more.
        """
        self._seen = self._called = _NOTHING
        self.follow = _ignore
        held: list[torch.Tensor] = []
        self._notes = [kept for note in self._notes if (kept := note.settled(held)) is not None]
        return (self if self._notes else None), held

    # --- for a rerun

    def check(self) -> None:
        """Refuse what was changed in place since and cannot be put back."""
        for note in self._notes:
            if isinstance(note, VersionsNote) and (changed := note.changed()) is not None:
                tensor, version = changed
                raise CheckpointError(
                    f"{self._name_of(tensor)} was changed in place by the function or since it ran (version {version} "
                    f"then, {tensor._version} now), so the rerun would not repeat it; change it after the backward, or "
                    "make a new tensor"
                )

    def _name_of(self, tensor: torch.Tensor) -> str:
        for root in self._roots:
            for path, module in root.named_modules(prefix=type(root).__name__):
                for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                    if value is tensor or (_is_tensor(value) and not value.is_leaf and _is_alias(value, tensor)):
                        return f"{path}.{name}"
        return f"a tensor of shape {tuple(tensor.shape)} that the function uses"

    def path_of(self, module: nn.Module) -> str:
        """What to call a module in a message."""
        for root in self._roots:
            for path, found in root.named_modules(prefix=type(root).__name__):
                if found is module:
                    return str(path)
        return type(module).__name__

    @contextmanager
    def as_before(self, held: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Inside, all is as it was before the first run; afterwards, as it is now.

        Yields tensors that will have other values then, which were written in place since, as their versions tell.
        """
        undo: list[tuple[Note, Any]] = []
        _hook(self._hooked)  # it is a part of how it was: compiled code depends on whether there are hooks
        try:
            for note in tuple(self._notes):
                undo.append((note, note.put_back(held)))
            yield [tensor for note, now in undo if now is not None and (tensor := note.rewritten()) is not None]
        finally:
            _hook(-self._hooked)
            for note, now in reversed(undo):  # two of them may share their memory
                note.undo(now)


_HELD = (nn.Module, *GENERATORS)
_FOLLOWED = (*_HELD, *_FUNCTIONS)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_alias(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype is other.dtype and tensor.device == other.device and tensor.is_set_to(other)


def _has_version(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and not tensor.is_meta and not isinstance(tensor, FakeTensor)


@functools.cache
def _generators_named_in(kind: type[nn.Module]) -> tuple[Any, ...]:
    """Generators among the globals that the `forward` of a class names."""
    forward = kind.forward
    if not isinstance(forward, types.FunctionType) or is_foreign(forward.__module__):
        return ()
    named = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    return tuple(thing for thing in named if isinstance(thing, GENERATORS))


def _has_more_to_note(module: nn.Module) -> bool:
    """Whether a module has tensors that a run may write to, or names random generators."""
    parameters = [p for p in module._parameters.values() if p is not None]
    steady = all(parameter.requires_grad and _has_version(parameter) for parameter in parameters)
    return bool(module._buffers) or not steady or bool(_generators_named_in(type(module)))


def _entries(container: Any) -> list[tuple[Any, Any]]:
    # As they are stored: some dictionaries make something of an entry whenever they are asked.
    return list(dict.items(container) if isinstance(container, dict) else enumerate(container))


def _ignore(_: Any) -> None:
    """A generator that is met when nobody follows any more."""


class _Meeting(threading.local):
    def __init__(self) -> None:
        self.owners: list[Owners] = []


_meeting = _Meeting()
_lock = threading.Lock()
_users = 0
_KEY = -1  # torch numbers its own hooks from 0


def _meet(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():  # pragma: no cover  (it is traced, not run)
        return  # what is inside a compiled module was noted with it
    for owners in _meeting.owners:
        owners.meet(module)


def _hook(change: int) -> None:
    global _users
    if not change:
        return
    with _lock:
        _users += change
        if _users:
            torch_modules._global_forward_pre_hooks[_KEY] = _meet
        else:
            torch_modules._global_forward_pre_hooks.pop(_KEY, None)


def begin_meeting(owners: Owners) -> None:
    """From now on, modules that this thread calls are noted before they run, until `end_meeting`."""
    owners._hooked = owners.meets
    _hook(owners._hooked)
    _meeting.owners.append(owners)


def end_meeting() -> None:
    """See `begin_meeting`."""
    _hook(-_meeting.owners.pop()._hooked)
