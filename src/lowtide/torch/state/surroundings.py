"""What a function can see and change beside its arguments, as it was before a call, for a rerun of that call.

Before the first run everything within reach (`reach.py`) is noted: the dictionaries of modules and objects, the
variables that functions close over, small containers, the versions of tensors, and copies of those that may be changed
in place. Modules are met when they are called as well, and then all that is inside them is noted, since it may be read
without being called. A rerun finds all of it as it was then, and afterwards it is put back as it was before the rerun:
so buffers and attributes change once, and a module that was switched to eval in between, or had parameters of
`functional_call`, runs as it ran. A tensor that was changed in place since, and of which there is no copy, is refused.

It has to be quick, since it is done at every call: dictionaries are compared by the identity of their values, and what
modules without state look like is remembered.
"""

from __future__ import annotations

import threading
import weakref
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
from lowtide.torch.state.notes import (
    SMALL,
    ArrayNote,
    ContentsNote,
    MappingNote,
    ModuleNote,
    Note,
    PlaceNote,
    RowNote,
    TailNote,
    VersionsNote,
    may_be_copied,
    same_entries,
)
from lowtide.torch.state.reach import (
    ATOMS,
    MODULE_INTERNALS,
    Entry,
    Member,
    Reach,
    Slot,
    Variable,
    has_method,
    names_for,
    names_in,
)

_ANY = float("inf")
# Of longer containers only what is added at the end is seen.
_MOST_ENTRIES = 1000
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OBJECTS = (*_HOOKS, "_modules", "_backward_hooks", "_backward_pre_hooks")
_NOTHING: set[int] = set()
_LISTS = (nn.ModuleList, nn.ModuleDict)  # cannot be called
_HOLDERS = (*_LISTS, nn.Sequential)


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


class Surroundings(Reach):
    """Notes of one call. Make it, `find_call`, run between `begin_meeting` and `end_meeting`, `finish`."""

    __slots__ = ("_hooked", "_notes", "_partly", "_roots", "follow", "is_lazy", "meets")

    def __init__(self, follow: Callable[[Any], None]) -> None:
        super().__init__()
        self.follow = follow  # is handed every random generator
        self.is_lazy = False  # whether a module in it has no parameters yet
        # Whether modules have to be met when they are called. All that is inside one that is itself called is known.
        self.meets = False
        self._hooked = False
        self._notes: list[Note] = []
        self._partly: set[int] = set()  # modules of which only the parts that the code names are noted
        self._roots: list[tuple[str, nn.Module | Slot]] = []  # by the names that messages give them

    # --- noting

    def find_call(self, function: Any, arguments: list[Any]) -> None:
        """Note what the function and its arguments reach; the calls around it note that too."""
        for notes in (self, *_meeting.notes):
            notes.find(function)
            for argument in arguments:
                if type(argument) not in ATOMS:
                    notes.find(argument, "an argument", names_for(function))

    def meet(self, module: nn.Module) -> None:
        """A module is about to be called."""
        if id(module) in self._partly:
            self._find_in_methods(type(module), None, "forward")
            self._take_part(module, None)
        else:
            self.find(module)

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """See `Reach`."""
        self.meets |= names is not None
        self._roots.append((label, module))
        self._take_part(module, names)

    def _take_part(self, module: nn.Module, names: frozenset[str] | None) -> None:
        """What is called takes part with all that is inside, called or only read; of others, what the code names."""
        pending = [(module, names)]
        while pending:
            module, names = pending.pop()
            if id(module) not in self._partly:
                self._note_anyhow(module)
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if names is None:
                self._partly.discard(id(module))
                for child in module._modules.values():
                    if child is not None and (id(child) not in self._seen or id(child) in self._partly):
                        self._seen.add(id(child))
                        self._find_in_methods(type(child), None, "forward")
                        pending.append((child, None))
            elif module._modules:
                self._partly.add(id(module))
                for part in _named_parts(module, names):
                    if id(part) not in self._seen:
                        self._seen.add(id(part))
                        self._find_in_methods(type(part), names, "forward")
                        pending.append((part, names_in(type(part), names)))

    def _note_anyhow(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # has no dictionaries of Python's
            self._notes.append(VersionsNote(list(module.parameters())))
            for buffer in module.buffers():
                self._note_tensor(buffer, _ANY)
        # A lazy one becomes another module in its first run, and that is what the rerun has to see.
        elif isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            self.is_lazy = True
        else:
            self._note_module(module)

    def _note_module(self, module: nn.Module) -> None:
        known, attributes = _known_of(module), module.__dict__
        if known.training is not module.training:
            known.training = module.training
            known.steady.clear()
        if not same_entries(attributes, known.attributes):
            odd = [k for k, v in attributes.items() if k not in MODULE_INTERNALS and type(v) not in ATOMS]
            # What holds objects is not remembered: they may hold the module, which would then never be freed.
            known.attributes = {} if odd or any(attributes[name] for name in _OBJECTS) else dict(attributes)
            for key in odd:
                value = attributes[key]
                if not isinstance(value, nn.Module):
                    self.find(value, f"{type(module).__name__}.{key}", frozenset())
        self._notes.append(ModuleNote(attributes, known.attributes or dict(attributes)))
        if module._parameters:
            owned: list[torch.Tensor] = [
                p for p in module._parameters.values() if p is not None and not p.is_inference()
            ]
            self._notes.append(VersionsNote(owned))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._note_tensor(buffer, SMALL if name in known.steady else _ANY, (known.steady, name))
        for name in _HOOKS:
            for hook in attributes[name].values():
                self.find(hook)
        if "parametrizations" in module._modules and id(parametrize) not in self._seen:
            self._seen.add(id(parametrize))  # inside `parametrize.cached` it has weights that were made before
            for name in ("_cache_enabled", "_cache"):
                self.on_global(Entry(vars(parametrize), name, name, in_module=False))
            self._notes.append(MappingNote(parametrize._cache))

    def _note_tensor(self, tensor: torch.Tensor, most: float, steady: tuple[set[str], str] | None = None) -> None:
        if may_be_copied(tensor, most):
            self._notes.append(ContentsNote(tensor, steady))
        elif not tensor.is_inference() and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self._notes.append(VersionsNote([tensor]))

    def on_function(self) -> None:
        """See `Reach`."""
        self.meets = True

    def on_object(self, thing: Any, label: str) -> None:
        """See `Reach`."""
        self.meets = True
        if type(thing).__dictoffset__:
            self._notes.append(MappingNote(vars(thing)))

    def on_slot(self, slot: Member) -> None:
        """See `Reach`."""
        self._notes.append(PlaceNote(slot))

    def on_variable(self, slot: Variable) -> None:
        """See `Reach`."""
        self._notes.append(PlaceNote(slot))
        self._roots.append((slot.label, slot))

    def on_global(self, slot: Entry) -> None:
        """See `Reach`."""
        self._notes.append(PlaceNote(slot))

    def on_container(self, container: Any, label: str) -> None:
        """See `Reach`."""
        if len(container) > _MOST_ENTRIES:
            if isinstance(container, list):
                self._notes.append(TailNote(container))
        else:
            self._notes.append(MappingNote(container) if isinstance(container, dict) else RowNote(container))

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """See `Reach`."""
        self._note_tensor(tensor, SMALL)

    def on_array(self, array: np.ndarray[Any, Any]) -> None:
        """See `Reach`."""
        if array.nbytes <= SMALL and array.flags.writeable:
            self._notes.append(ArrayNote(array))

    def on_generator(self, generator: Any) -> None:
        """See `Reach`."""
        self.follow(generator)

    # --- after the first run

    def finish(self) -> tuple[Surroundings | None, list[torch.Tensor]]:
        """Keep what a rerun needs; returns itself, unless nothing was found, and tensors to be kept with the arguments.

        Those are the ones that were taken out of their places: nobody else may hold them any more.
        """
        self._seen = self._partly = _NOTHING
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
        for label, root in self._roots:
            if not isinstance(root, nn.Module):
                if root.get() is tensor:
                    return label
                continue
            for path, module in root.named_modules(prefix=label):
                for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                    if value is tensor:
                        return f"{path}.{name}"
        return f"a tensor of shape {tuple(tensor.shape)} that the function uses"

    def path_of(self, module: nn.Module) -> str:
        """What to call a module in a message."""
        for label, root in self._roots:
            for path, found in root.named_modules(prefix=label) if isinstance(root, nn.Module) else ():
                if found is module:
                    return str(path)
        return type(module).__name__

    @contextmanager
    def as_before(self, held: list[torch.Tensor]) -> Iterator[None]:
        """Inside, all is as it was before the first run; afterwards, as it is now."""
        undo: list[tuple[Note, Any]] = []
        _hook(self._hooked)  # it is a part of how it was: compiled code depends on whether there are hooks
        try:
            for note in tuple(self._notes):
                undo.append((note, note.put_back(held)))
            yield
        finally:
            _hook(-self._hooked)
            for note, now in reversed(undo):  # two of them may share their memory
                note.undo(now)


def _named_parts(module: nn.Module, names: frozenset[str]) -> Iterator[nn.Module]:
    """Submodules that code with these names may get at without calling them."""
    in_holder = isinstance(module, _HOLDERS)
    for name, child in module._modules.items():
        if child is None or not (in_holder or name in names):
            continue
        if isinstance(child, _LISTS if in_holder else _HOLDERS):
            yield from _named_parts(child, names)
        # Of a list of modules, those that are called are met; those of which a method is called are not.
        elif (
            name in names
            or has_method(type(child), names)
            or not (names.isdisjoint(child._parameters) and names.isdisjoint(child._buffers))
        ):
            yield child


def _ignore(_: Any) -> None:
    """A generator that is met when nobody follows any more."""


class _Meeting(threading.local):
    def __init__(self) -> None:
        self.notes: list[Surroundings] = []


_meeting = _Meeting()
_lock = threading.Lock()
_users = 0
_KEY = -1  # torch numbers its own hooks from 0


def _meet(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():  # pragma: no cover  (it is traced, not run)
        return  # what is inside a compiled module was noted with it
    for notes in _meeting.notes:
        notes.meet(module)


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


def begin_meeting(notes: Surroundings) -> None:
    """From now on, modules that this thread calls are noted before they run, until `end_meeting`."""
    notes._hooked = notes.meets
    _hook(notes._hooked)
    _meeting.notes.append(notes)


def end_meeting() -> None:
    """See `begin_meeting`."""
    _hook(-_meeting.notes.pop()._hooked)
