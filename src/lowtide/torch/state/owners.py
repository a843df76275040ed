"""Owners: modules, and objects whose methods are called, with everything in them as it was before a call.

A rerun finds them as the first run found them, and afterwards they are as they were before the rerun: buffers and
attributes change once, and a module that was switched to eval in between, or had the parameters of `functional_call`,
runs as it ran. A module takes part if it is called, or if the function is one of its methods, closes over it or names
it among its globals; and with it all that is inside: buffers, attributes, containers, plain objects, submodules.
Objects of torch's own classes are not followed, because FSDP keeps its state in them. Of an object of the user's whose
method is called, numbers, tensors, modules and generators are repeated; its containers are the user's, as is everything
else that a function can see: nothing of that is put back, and the samples that are compared show where it mattered.

It has to be quick, since it is done at every call: dictionaries are compared by the identity of their values, and what
modules without state look like is remembered.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lowtide.errors import CheckpointError
from lowtide.torch.state.generators import KINDS as GENERATORS
from lowtide.torch.state.notes import (
    SMALL,
    ContentsNote,
    Note,
    StructureNote,
    VersionsNote,
    has_version,
    may_be_copied,
    needs_grad,
    notes_of,
)
from lowtide.torch.state.plain_modules import plain_modules
from lowtide.torch.state.structure import ATOMS, MODULE_INTERNALS, Entry, Place, is_foreign, is_plain_object, own_places
from lowtide.torch.state.surroundings import bound_in, generators_named_in, names_in

_ANY = float("inf")
_MOST_DEPTH = 8  # of containers and objects in each other
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_PASSED_OVER = ATOMS - {types.FunctionType, types.MethodType}  # among what a function names
_NOTHING: set[int] = set()


class _Known:
    """What is remembered of a module between calls."""

    __slots__ = ("module", "steady", "training")

    def __init__(self, module: weakref.ref[nn.Module]) -> None:
        self.module = module
        self.training: bool | None = None
        self.steady: set[str] = set()  # buffers that a run in this mode was seen to leave alone


_known: dict[int, _Known] = {}


def _steady_of(module: nn.Module) -> set[str]:
    key = id(module)
    known = _known.get(key)
    if known is None or known.module() is not module:
        known = _known[key] = _Known(weakref.ref(module, lambda _: _known.pop(key, None)))
    if known.training is not module.training:
        known.training = module.training
        known.steady.clear()
    return known.steady


class Owners:
    """Notes of one call. Make it, `find_call`, run between `begin_meeting` and `end_meeting`, `finish`."""

    __slots__ = ("_called", "_hooked", "_notes", "_odd", "_roots", "_seen", "_undo", "follow", "is_lazy", "meets")

    def __init__(self, follow: Callable[[Any], None]) -> None:
        self.follow = follow  # is handed every random generator
        self.is_lazy = False  # whether a module in it has no parameters yet
        # Whether modules have to be met when they are called. All that is inside one that is itself called is known.
        self.meets = False
        self._hooked = False
        self._seen: set[int] = set()
        self._called: set[int] = set()  # modules whose parameters are watched
        self._notes: list[Note] = []
        self._odd: list[Place] = []  # of attributes that are more than numbers, to be noted together
        self._roots: list[nn.Module] = []  # for messages
        self._undo: list[tuple[Note, Any]] | None = None  # in a rerun: each note, and what it has put aside

    # --- finding

    def find_call(self, function: Any, held: list[Any]) -> None:
        """Note what the function has, and what it is given; the calls around it note that too."""
        if not held and _has_nothing(function):
            self.meets = True
            return
        for owners in (self, *_meeting.owners):
            owners.find(function)
            for thing in held:
                owners.find(thing)
            owners._note_odd()

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
        if type(function) is types.FunctionType:
            held = _held_by(function)
        elif isinstance(function, functools.partial):
            held = [function.func, *function.args, *function.keywords.values()]
        else:
            held = [function.__func__]
            # A module's own `forward` is a call of the module, without its hooks.
            self._find_owner(function.__self__, is_called=function.__name__ == "forward" and depth == 0)
        for thing in held:
            if isinstance(thing, _FOLLOWED):
                self.find(thing, depth + 1)
            elif is_plain_object(type(thing)):  # the user's own, but for the modules and generators that it has
                for value in list(getattr(thing, "__dict__", {}).values()):
                    if isinstance(value, _HELD):
                        self.find(value, depth + 1)

    def _find_owner(self, owner: Any, *, is_called: bool) -> None:
        """What a method is bound to."""
        if isinstance(owner, nn.Module):
            self._find_module(owner, is_called=is_called)
        elif is_plain_object(type(owner)):
            self._find_object(owner)

    def _find_object(self, thing: Any) -> None:
        """An object of the user's whose method is called."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        self._odd += own_places(thing)
        for value in list(getattr(thing, "__dict__", {}).values()):
            if isinstance(value, _HELD):
                self.find(value)

    # --- noting

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called."""
        self._find_module(module, is_called=True)
        self._note_odd()

    def _watch_parameters(self, module: nn.Module) -> None:
        """Parameters of a module that is called, and of those inside, have to stay what they are."""
        if isinstance(module, torch.jit.ScriptModule):
            self._notes.append(VersionsNote(list(module.parameters())))
            return
        pending = [module]
        owned: list[torch.Tensor] = []
        while pending:
            module = pending.pop()
            if id(module) not in self._called:
                self._called.add(id(module))
                # One without grad may be a counter: it is noted with its contents.
                owned += [
                    p
                    for p in module._parameters.values()
                    if p is not None and has_version(p) and (p.requires_grad or not may_be_copied(p, SMALL))
                ]
                pending += [child for child in module._modules.values() if child is not None]
        if owned:
            self._notes.append(VersionsNote(owned))

    def _take_part(self, module: nn.Module) -> None:
        """A module takes part with all that is inside, called or only read."""
        pending = [module]
        while pending:
            module = pending.pop()
            if id(module) in self._seen:
                continue
            plain = plain_modules(module)
            if plain is not None:
                self._notes.append(plain)
                self._seen.update(plain.ids)
                for inside in plain.with_tensors:
                    self._note_registered(inside)
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
        attributes = vars(module)
        self._notes += notes_of(module)
        managed = "_is_fsdp_managed_module" in attributes  # its tensors are FSDP's
        for key, value in list(attributes.items()):
            if key not in MODULE_INTERNALS and not _is_plain(value) and not (managed and needs_grad(value)):
                self._note_attribute(module, key)
        self._note_registered(module)
        for name in _HOOKS:
            for hook in attributes[name].values():
                self.find(hook)

    def _note_registered(self, module: nn.Module) -> None:
        """Note buffers, parameters without grad, weights that parametrisations have made, and named generators."""
        steady = _steady_of(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad and may_be_copied(parameter, SMALL):
                self._notes.append(ContentsNote(parameter, (steady, name)))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._note_tensor(buffer, SMALL if name in steady else _ANY, (steady, name))
        for generator in generators_named_in(type(module)):
            self.find(generator)
        if "parametrizations" in module._modules and id(parametrize) not in self._seen:
            self._seen.add(id(parametrize))  # inside `parametrize.cached` it has weights that were made before
            self._odd += [Entry(vars(parametrize), name) for name in ("_cache_enabled", "_cache")]

    def _note_attribute(self, module: nn.Module, key: str) -> None:
        """Note an attribute of a module that is not a plain number."""
        value = vars(module)[key]
        if isinstance(value, nn.Module):
            self._take_part(value)
        elif isinstance(value, _FUNCTIONS):
            self.find(value, 1)
        elif isinstance(value, torch.Tensor):
            steady = _steady_of(module)
            self._note_tensor(value, SMALL if key in steady else _ANY, (steady, key))
        elif isinstance(value, GENERATORS):
            self.find(value)
        else:
            self._odd.append(Entry(vars(module), key))

    def _note_odd(self) -> None:
        """Note what all modules and objects found since have at these places, together: they may share objects."""
        while self._odd:
            found: list[Any] = []
            note = StructureNote(self._odd, found)
            self._notes.append(note)
            self._odd = []
            for tensor in note.tensors:
                if id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    self._note_tensor(tensor, SMALL)
            for thing in found:
                if isinstance(thing, _HELD):
                    self.find(thing, 1)
        if self._undo is not None:  # the rerun of a first run that is not over has gone further than that
            self._undo += [(note, note.put_back([])) for note in self._notes[len(self._undo) :]]

    def _note_tensor(self, tensor: torch.Tensor, most: float, steady: tuple[set[str], str] | None = None) -> None:
        if may_be_copied(tensor, most):
            self._notes.append(ContentsNote(tensor, steady))
        elif has_version(tensor):
            self._notes.append(VersionsNote([tensor]))

    # --- after the first run

    def finish(self) -> tuple[Owners | None, list[torch.Tensor]]:
        """Keep what a rerun needs; returns itself, unless nothing was found, and tensors to be kept with the arguments.

        Those are the ones that were taken out of their places: nobody else may hold them any more.
        """
        if not self._notes:
            return None, []
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
                    f"then, {tensor._version} now), so the rerun would not repeat it; change it after the backward, "
                    "make a new tensor, or keep what changes it (nn.Embedding with max_norm, for one) out of the call"
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
        around, self._undo = self._undo, None
        # Where a backward inside a function brings the rerun about, calls whose first runs are not over wait for it:
        # the modules that are called now are none of theirs.
        waiting, _meeting.owners = _meeting.owners, [self] if self in _meeting.owners else []
        _hook(self._hooked)  # it is a part of how it was: compiled code depends on whether there are hooks
        try:
            for note in tuple(self._notes):
                undo.append((note, note.put_back(held)))
            self._undo = undo
            yield [tensor for note, now in undo if now is not None and (tensor := note.rewritten()) is not None]
        finally:
            self._undo, _meeting.owners = around, waiting
            _hook(-self._hooked)
            for note, now in reversed(undo):  # two of them may share their memory
                note.undo(now)


_HELD = (nn.Module, *GENERATORS)
_FOLLOWED = (*_HELD, *_FUNCTIONS)


def _held_by(function: types.FunctionType) -> list[Any]:
    """What a function holds that has to be looked at: the quick form of `named_by`, without names."""
    if is_foreign(function.__module__):
        return []
    named = map(function.__globals__.get, names_in(function.__code__))
    held = [thing for thing in named if type(thing) not in _PASSED_OVER]
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        held += [thing for _, thing in bound_in(function) if type(thing) not in _PASSED_OVER]
    return held


def _has_nothing(function: Any) -> bool:
    """Whether it is a function, as many small ones are, that closes over nothing and names nothing to be looked at."""
    return (
        type(function) is types.FunctionType
        and not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
        and _PASSED_OVER.issuperset(map(type, map(function.__globals__.get, names_in(function.__code__))))
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_alias(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype is other.dtype and tensor.device == other.device and tensor.is_set_to(other)


def _is_plain(value: Any) -> bool:
    """Whether nothing can be changed in an attribute, nor in what it holds, as functions of the user's may."""
    if isinstance(value, _FUNCTIONS):
        return is_foreign(getattr(value, "__module__", None))
    return type(value) in ATOMS or (type(value) is tuple and all(type(part) in ATOMS for part in value))


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
    # A hook of a call around this one is there too, and has to be in a rerun, which may come without that call's.
    owners._hooked = owners.meets or _users > 0
    _hook(owners._hooked)
    _meeting.owners.append(owners)


def end_meeting() -> None:
    """From now on, modules that this thread calls are not noted any more."""
    _hook(-_meeting.owners.pop()._hooked)
