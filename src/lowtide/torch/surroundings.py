"""What a function can see and change beside its arguments, as it was before a call, for a rerun of that call.

Before the first run everything within reach (`reach.py`) is noted: the dictionaries of modules and objects, the
variables that functions close over, small containers, the versions of tensors, and copies of those that may be changed
in place. Modules are met when they are called as well. A rerun finds all of it as it was then, and afterwards it is
put back as it was before the rerun: so buffers and attributes change once, and a module that was switched to eval in
between runs as it ran. A tensor that was changed in place since, and of which there is no copy, is refused.

It has to be quick, since it is done at every call: dictionaries are compared by the identity of their values, and what
modules without state look like is remembered.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.lazy import LazyModuleMixin

from lowtide.errors import CheckpointError
from lowtide.torch.bits import same_bits
from lowtide.torch.reach import ATOMS, MISSING, Entry, Reach, Slot, Variable
from lowtide.torch.slots import MODULE_INTERNALS

# Tensors outside modules' buffers are copied only up to this size; a larger one may be a whole data set.
_SMALL = 64 * 1024
_ANY = float("inf")
_MOST_ENTRIES = 1000
_PLAIN = ATOMS | {tuple, types.FunctionType}
# Dictionaries among a module's internals that decide what a call of it does.
_INSIDE = ("_modules", "_forward_hooks", "_forward_pre_hooks")
_NOTHING: set[int] = set()
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Held:
    """In a note, the place of a tensor that is kept with the call's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Known:
    """What a module looked like at its last call, so that an equal note need not be made again."""

    __slots__ = ("attributes", "inside", "parameters", "steady", "training")

    def __init__(self) -> None:
        self.training: bool | None = None
        self.attributes: _Mapping | None = None
        self.inside: list[_Mapping] | None = None
        self.parameters: _Mapping | None = None
        self.steady: set[str] = set()  # buffers that a run in this mode was seen to leave alone


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class Surroundings(Reach):
    """Notes of one call. Make it, `find_call`, run between `begin_meeting` and `end_meeting`, `finish`."""

    __slots__ = ("_notes", "_roots", "sources")

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[_Note] = []
        self._roots: list[tuple[str, nn.Module | Slot]] = []  # by the names that messages give them
        self.sources: list[Any] = []  # random generators

    # --- noting

    def find_call(self, function: Any, arguments: list[Any]) -> None:
        """Note what the function and its arguments reach; the calls around it note that too."""
        for notes in (self, *_meeting.notes):
            notes.find(function)
            for argument in arguments:
                if type(argument) not in ATOMS:
                    notes.find(argument, "an argument")

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """See `Reach`. What is called takes part with all that is inside; of others, the parts that the code names."""
        self._roots.append((label, module))
        pending = [module]
        while pending:
            module = pending.pop()
            # A lazy one becomes another module in its first run, and that is what the rerun has to see.
            if not isinstance(module, LazyModuleMixin) or not module.has_uninitialized_params():
                self._note_module(module)
            for name, child in module._modules.items():
                if child is None or id(child) in self._seen:
                    continue
                if names is None or (name in names and not isinstance(child, _HOLDERS)):
                    self._seen.add(id(child))
                    pending.append(child)

    def _note_module(self, module: nn.Module) -> None:
        known = _known.get(module)
        if known is None:
            known = _known[module] = _Known()
        if known.training is not module.training:
            known.training = module.training
            known.steady.clear()
        attributes = module.__dict__
        if known.attributes is None or not known.attributes.is_unchanged():
            note = _Mapping(attributes)
            odd = [(k, v) for k, v in attributes.items() if type(v) not in _PLAIN and k not in MODULE_INTERNALS]
            known.attributes = None if odd else note
            for key, value in odd:
                if not isinstance(value, nn.Module):
                    self.find(value, f"{type(module).__name__}.{key}", frozenset())
        else:
            note = known.attributes
        self._notes.append(note)
        if known.inside is None or not all(inner.is_unchanged() for inner in known.inside):
            known.inside = [_Mapping(module.__dict__[name]) for name in _INSIDE]
        self._notes += known.inside
        if module._parameters:
            self._note_parameters(module._parameters, known)
        if module._buffers:
            self._note_buffers(module._buffers, known)

    def _note_parameters(self, parameters: dict[str, Any], known: _Known) -> None:
        note = known.parameters
        if note is None or not note.is_unchanged():
            note = _Mapping(parameters)
            # Tensors that were put in a parameter's place would be kept alive by what is remembered.
            own = all(parameter is None or parameter.is_leaf for parameter in parameters.values())
            known.parameters = note if own else None
        self._notes.append(note)
        self._notes.append(_Versions([p for p in parameters.values() if p is not None and not p.is_inference()]))

    def _note_buffers(self, buffers: dict[str, Any], known: _Known) -> None:
        self._notes.append(_Mapping(buffers))
        for name, buffer in buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._note_tensor(buffer, _SMALL if name in known.steady else _ANY, (known.steady, name))

    def _note_tensor(self, tensor: torch.Tensor, most: float, steady: tuple[set[str], str] | None = None) -> None:
        if may_be_copied(tensor, most):
            self._notes.append(_Contents(tensor, steady))
        elif not tensor.is_inference():
            self._notes.append(_Versions([tensor]))

    def on_object(self, thing: Any, label: str) -> None:
        """See `Reach`."""
        self._notes.append(_Mapping(vars(thing)))

    def on_variable(self, slot: Variable) -> None:
        """See `Reach`."""
        self._notes.append(_Place(slot))
        self._roots.append((slot.label, slot))

    def on_global(self, slot: Entry) -> None:
        """See `Reach`."""
        self._notes.append(_Place(slot))

    def on_container(self, container: Any, label: str) -> None:
        """See `Reach`."""
        if len(container) <= _MOST_ENTRIES:
            self._notes.append(_Mapping(container) if isinstance(container, dict) else _Row(container))

    def on_tensor(self, tensor: torch.Tensor, label: str) -> None:
        """See `Reach`."""
        self._note_tensor(tensor, _SMALL)

    def on_array(self, array: np.ndarray[Any, Any]) -> None:
        """See `Reach`."""
        if array.nbytes <= _SMALL and array.flags.writeable:
            self._notes.append(_Array(array))

    def on_generator(self, generator: Any) -> None:
        """See `Reach`."""
        self.sources.append(generator)

    # --- after the first run

    def finish(self) -> tuple[Surroundings | None, list[torch.Tensor]]:
        """Keep what a rerun needs; gives itself, unless nothing was found, and tensors to be kept with the arguments.

        Those are the ones that were taken out of their places: nobody else may hold them any more.
        """
        self._seen = _NOTHING
        held: list[torch.Tensor] = []
        if not self._notes:
            return None, held
        self._notes = [note.settled(held) for note in self._notes]
        return self, held

    # --- for a rerun

    def check(self) -> None:
        """Refuse what was changed in place since and cannot be put back."""
        for note in self._notes:
            if isinstance(note, _Versions) and (changed := note.changed()) is not None:
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
        undo = [note.put_back(held) for note in self._notes]
        _hook(1)  # it is a part of how it was: compiled code depends on whether there are hooks
        try:
            yield
        finally:
            _hook(-1)
            for note, now in zip(self._notes, undo, strict=True):
                note.undo(now)


class _Note:
    """One thing as it was before the first run."""

    __slots__ = ()

    def settled(self, held: list[torch.Tensor]) -> _Note:
        """After the first run: the note to keep. Tensors that were replaced move to `held`."""
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Make it as it was; gives what is there now."""

    def undo(self, now: Any) -> None:
        """After a rerun: make it as `put_back` found it."""


class _Mapping(_Note):
    """A dictionary: attributes, buffers, parameters, or the user's own."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: dict[Any, Any], before: dict[Any, Any] | None = None) -> None:
        self._owner = owner
        self._before = dict(owner) if before is None else before

    def is_unchanged(self) -> bool:
        """Whether the entries are the very same objects, under the same names."""
        now, then = self._owner, self._before
        if not now and not then:
            return True
        return len(now) == len(then) and all(map(is_, now.values(), then.values())) and list(now) == list(then)

    def settled(self, held: list[torch.Tensor]) -> _Note:
        if self.is_unchanged():
            return self
        now = self._owner
        taken = {key: _hold(value, held) for key, value in self._before.items() if now.get(key, MISSING) is not value}
        return _Mapping(now, self._before | taken)  # another one: this may be what is remembered of a module

    def put_back(self, held: list[torch.Tensor]) -> Any:
        if self.is_unchanged():
            return self._before
        now = dict(self._owner)
        self._fill({key: _resolved(value, held) for key, value in self._before.items()})
        return now

    def undo(self, now: Any) -> None:
        if now is not self._before or not self.is_unchanged():
            self._fill(now)

    def _fill(self, entries: dict[Any, Any]) -> None:
        self._owner.clear()
        self._owner.update(entries)


class _Row(_Note):
    """A list, a deque or a set."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = list(owner)

    def settled(self, held: list[torch.Tensor]) -> _Note:
        if not self._is_unchanged():
            self._before = [_hold(value, held) for value in self._before]
        return self

    def _is_unchanged(self) -> bool:
        return len(self._owner) == len(self._before) and all(map(is_, self._owner, self._before))

    def put_back(self, held: list[torch.Tensor]) -> Any:
        if self._is_unchanged():
            return self._before
        now = list(self._owner)
        self._fill([_resolved(value, held) for value in self._before])
        return now

    def undo(self, now: Any) -> None:
        if now is not self._before or not self._is_unchanged():
            self._fill(now)

    def _fill(self, entries: list[Any]) -> None:
        self._owner.clear()
        if isinstance(self._owner, set):
            self._owner.update(entries)
        else:
            self._owner.extend(entries)


class _Place(_Note):
    """A variable."""

    __slots__ = ("_before", "_slot")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._before = slot.get()

    def settled(self, held: list[torch.Tensor]) -> _Note:
        if self._slot.get() is not self._before:
            self._before = _hold(self._before, held)
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = self._slot.get()
        self._slot.set(_resolved(self._before, held))
        return now

    def undo(self, now: Any) -> None:
        self._slot.set(now)


class _Versions(_Note):
    """Tensors whose values have to stay what they are."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], versions: list[int] | None = None) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors] if versions is None else versions

    def changed(self) -> tuple[torch.Tensor, int] | None:
        """A tensor that did not stay, and the version that it had."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                return tensor, version
        return None


class _Contents(_Note):
    """A tensor whose values may be changed in place. `steady` has the names of those that were seen not to be."""

    __slots__ = ("_copy", "_steady", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, steady: tuple[set[str], str] | None) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._steady = steady
        self._copy = tensor.detach().clone()

    def settled(self, held: list[torch.Tensor]) -> _Note:
        if is_changed(self._tensor, self._version, self._copy):
            return self
        if self._steady is not None:
            self._steady[0].add(self._steady[1])
        return _Versions([self._tensor], [self._version])

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = self._tensor.detach().clone()
        self.undo(self._copy)
        return now

    def undo(self, now: Any) -> None:
        self._tensor.data.copy_(now)  # through `data` its version stays: for autograd nothing has happened


def may_be_copied(tensor: torch.Tensor, most: float = _SMALL) -> bool:
    """Whether the tensor is one that a function may change in place, and small enough to keep a copy of it."""
    return (
        not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.nbytes <= most
        and not tensor.is_inference()
        and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    )


def is_changed(tensor: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Whether a tensor was written to since it had this version and these values; BatchNorm leaves the version."""
    return tensor._version != version or not same_bits(tensor, copy)


class _Array(_Note):
    """A numpy array."""

    __slots__ = ("_array", "_before")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._before = array.copy()

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = self._array.copy()
        self._array[...] = self._before
        return now

    def undo(self, now: Any) -> None:
        self._array[...] = now


def _hold(value: Any, held: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    held.append(value)
    return _Held(len(held) - 1)


def _resolved(value: Any, held: list[torch.Tensor]) -> Any:
    return held[value.index] if type(value) is _Held else value


class _Meeting(threading.local):
    def __init__(self) -> None:
        self.notes: list[Surroundings] = []


_meeting = _Meeting()
_lock = threading.Lock()
_users = 0
_KEY = -1  # torch numbers its own hooks from 0


def _meet(module: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        return  # what is inside a compiled module was noted with it
    for notes in _meeting.notes:
        if id(module) not in notes._seen:
            notes._seen.add(id(module))
            notes.on_module(module, type(module).__name__, None)


def _hook(change: int) -> None:
    global _users
    with _lock:
        _users += change
        if _users:
            torch_modules._global_forward_pre_hooks[_KEY] = _meet
        else:
            torch_modules._global_forward_pre_hooks.pop(_KEY, None)


def begin_meeting(notes: Surroundings) -> None:
    """From now on, modules that this thread calls are noted before they run, until `end_meeting`."""
    _hook(1)
    _meeting.notes.append(notes)


def end_meeting() -> None:
    """See `begin_meeting`."""
    _meeting.notes.pop()
    _hook(-1)
