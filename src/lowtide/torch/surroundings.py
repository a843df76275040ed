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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_modules
from torch.nn.modules.lazy import LazyModuleMixin

from lowtide.errors import CheckpointError
from lowtide.torch.bits import same_bits
from lowtide.torch.reach import ATOMS, MISSING, Entry, Member, Reach, Slot, Variable, has_method
from lowtide.torch.slots import MODULE_INTERNALS

# Tensors outside modules' buffers are copied only up to this size; a larger one may be a whole data set.
_SMALL = 64 * 1024
_ANY = float("inf")
# Of longer containers only what is added at the end is seen.
_MOST_ENTRIES = 1000
# Dictionaries among a module's internals that decide what a call of it does.
_INSIDE = (
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OBJECTS = (*_HOOKS, "_modules", "_backward_hooks", "_backward_pre_hooks")
_NOTHING: set[int] = set()
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Held:
    """In a note, the place of a tensor that is kept with the call's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


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

    __slots__ = ("_hooked", "_notes", "_roots", "follow", "is_lazy", "meets")

    def __init__(self, follow: Callable[[Any], None]) -> None:
        super().__init__()
        self.follow = follow  # is handed every random generator
        self.is_lazy = False  # whether a module in it has no parameters yet
        # Whether modules have to be met when they are called. All that is inside one that is itself called is known.
        self.meets = False
        self._hooked = False
        self._notes: list[_Note] = []
        self._roots: list[tuple[str, nn.Module | Slot]] = []  # by the names that messages give them

    # --- noting

    def find_call(self, function: Any, arguments: list[Any]) -> None:
        """Note what the function and its arguments reach; the calls around it note that too."""
        for notes in (self, *_meeting.notes):
            notes.find(function)
            for argument in arguments:
                if type(argument) not in ATOMS:
                    notes.find(argument, "an argument", frozenset())

    def on_module(self, module: nn.Module, label: str, names: frozenset[str] | None) -> None:
        """See `Reach`. What is called takes part with all that is inside; of others, the parts that the code names."""
        self.meets |= names is not None
        self._roots.append((label, module))
        pending = [module]
        while pending:
            module = pending.pop()
            if isinstance(module, torch.jit.ScriptModule):  # has no dictionaries of Python's
                self._notes.append(_Versions(list(module.parameters())))
                for buffer in module.buffers():
                    self._note_tensor(buffer, _ANY)
                continue
            # A lazy one becomes another module in its first run, and that is what the rerun has to see.
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                self.is_lazy = True
            else:
                self._note_module(module)
            for name, child in module._modules.items():
                if child is None or id(child) in self._seen:
                    continue
                # Of a list of modules, those that are called are met; those of which a method is called are not.
                parts = child._modules.values() if names is not None and isinstance(child, _HOLDERS) else (child,)
                for part in parts:
                    if names is None or (name in names and (part is child or has_method(type(part), names))):
                        self._seen.add(id(part))
                        self._find_in_methods(type(part), names, "forward")
                        pending.append(part)

    def _note_module(self, module: nn.Module) -> None:
        known, attributes = _known_of(module), module.__dict__
        if known.training is not module.training:
            known.training = module.training
            known.steady.clear()
        if not _same_entries(attributes, known.attributes):
            odd = [k for k, v in attributes.items() if k not in MODULE_INTERNALS and type(v) not in ATOMS]
            # What holds objects is not remembered: they may hold the module, which would then never be freed.
            known.attributes = {} if odd or any(attributes[name] for name in _OBJECTS) else dict(attributes)
            for key in odd:
                value = attributes[key]
                if not isinstance(value, nn.Module):
                    self.find(value, f"{type(module).__name__}.{key}", frozenset())
        self._notes.append(_Module(attributes, known.attributes or dict(attributes)))
        if module._parameters:
            owned: list[torch.Tensor] = [
                p for p in module._parameters.values() if p is not None and not p.is_inference()
            ]
            self._notes.append(_Versions(owned))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._note_tensor(buffer, _SMALL if name in known.steady else _ANY, (known.steady, name))
        for name in _HOOKS:
            for hook in attributes[name].values():
                self.find(hook)

    def _note_tensor(self, tensor: torch.Tensor, most: float, steady: tuple[set[str], str] | None = None) -> None:
        if may_be_copied(tensor, most):
            self._notes.append(_Contents(tensor, steady))
        elif not tensor.is_inference() and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self._notes.append(_Versions([tensor]))

    def on_function(self) -> None:
        """See `Reach`."""
        self.meets = True

    def on_object(self, thing: Any, label: str) -> None:
        """See `Reach`."""
        self.meets = True
        if type(thing).__dictoffset__:
            self._notes.append(_Mapping(vars(thing)))

    def on_slot(self, slot: Member) -> None:
        """See `Reach`."""
        self._notes.append(_Place(slot))

    def on_variable(self, slot: Variable) -> None:
        """See `Reach`."""
        self._notes.append(_Place(slot))
        self._roots.append((slot.label, slot))

    def on_global(self, slot: Entry) -> None:
        """See `Reach`."""
        self._notes.append(_Place(slot))

    def on_container(self, container: Any, label: str) -> None:
        """See `Reach`."""
        if len(container) > _MOST_ENTRIES:
            if isinstance(container, list):
                self._notes.append(_Tail(container))
        else:
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
        self.follow(generator)

    # --- after the first run

    def finish(self) -> tuple[Surroundings | None, list[torch.Tensor]]:
        """Keep what a rerun needs; gives itself, unless nothing was found, and tensors to be kept with the arguments.

        Those are the ones that were taken out of their places: nobody else may hold them any more.
        """
        self._seen = _NOTHING
        self.follow = _ignore
        held: list[torch.Tensor] = []
        self._notes = [kept for note in self._notes if (kept := note.settled(held)) is not None]
        return (self if self._notes else None), held

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
        undo: list[tuple[_Note, Any]] = []
        _hook(self._hooked)  # it is a part of how it was: compiled code depends on whether there are hooks
        try:
            for note in tuple(self._notes):
                undo.append((note, note.put_back(held)))
            yield
        finally:
            _hook(-self._hooked)
            for note, now in reversed(undo):  # two of them may share their memory
                note.undo(now)


def _ignore(_: Any) -> None:
    """A generator that is met when nobody follows any more."""


class _Note:
    """One thing as it was before the first run."""

    __slots__ = ()

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        """After the first run: the note to keep. Tensors that were replaced move to `held`."""
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Make it as it was; gives what is there now."""

    def undo(self, now: Any) -> None:
        """After a rerun: make it as `put_back` found it."""


class _Mapping(_Note):
    """A dictionary: attributes of an object, or the user's own."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: dict[Any, Any], before: dict[Any, Any] | None = None) -> None:
        self._owner = owner
        self._before = dict(owner) if before is None else before

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        now = self._owner
        if not _same_entries(now, self._before):
            before = self._before.items()
            taken = {key: _hold(value, held) for key, value in before if now.get(key, MISSING) is not value}
            self._before = self._before | taken  # another one: this may be shared
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        if _same_entries(self._owner, self._before):
            return self._before
        now = dict(self._owner)
        _fill(self._owner, {key: _resolved(value, held) for key, value in self._before.items()})
        return now

    def undo(self, now: Any) -> None:
        if not _same_entries(self._owner, now):
            _fill(self._owner, now)


class _Module(_Mapping):
    """A module's attributes, and the dictionaries among them, most of which are empty and stay so."""

    __slots__ = ("_inside",)

    def __init__(self, owner: dict[str, Any], before: dict[str, Any]) -> None:
        super().__init__(owner, before)
        self._inside = {name: _Mapping(owner[name]) for name in _INSIDE if owner[name]}

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        for note in self._inside.values():
            note.settled(held)
        return super().settled(held)

    def put_back(self, held: list[torch.Tensor]) -> Any:
        inside = [(note, note.put_back(held)) for note in self._inside.values()]
        for name in _INSIDE:
            filled = self._before[name]
            if filled and name not in self._inside:
                note = _Mapping(filled, {})
                inside.append((note, note.put_back(held)))
        return super().put_back(held), inside

    def undo(self, now: Any) -> None:
        super().undo(now[0])
        for note, inside in now[1]:
            note.undo(inside)


class _Row(_Note):
    """A list, a deque or a set."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = list(owner)

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        if not _same_row(self._owner, self._before):
            self._before = [_hold(value, held) for value in self._before]
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        if _same_row(self._owner, self._before):
            return self._before
        now = list(self._owner)
        _fill(self._owner, [_resolved(value, held) for value in self._before])
        return now

    def undo(self, now: Any) -> None:
        if not _same_row(self._owner, now):
            _fill(self._owner, now)


class _Tail(_Note):
    """A long list, of which only what is added at its end is seen."""

    __slots__ = ("_length", "_owner")

    def __init__(self, owner: list[Any]) -> None:
        self._owner = owner
        self._length = len(owner)

    def put_back(self, held: list[torch.Tensor]) -> Any:
        tail = self._owner[self._length :]
        del self._owner[self._length :]
        return tail

    def undo(self, now: Any) -> None:
        self._owner[self._length :] = now


class _Place(_Note):
    """A variable, or an attribute with a slot."""

    __slots__ = ("_before", "_slot")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._before = slot.get()

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        if self._slot.get() is not self._before:
            self._before = _hold(self._before, held)
        return self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = self._slot.get()
        if now is not self._before:
            self._slot.set(_resolved(self._before, held))
        return now

    def undo(self, now: Any) -> None:
        if self._slot.get() is not now:
            self._slot.set(now)


class _Versions(_Note):
    """Tensors whose values have to stay what they are; whether they need a gradient is put back."""

    __slots__ = ("_flags", "_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], versions: list[int] | None = None) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors] if versions is None else versions
        self._flags = [tensor.requires_grad for tensor in tensors]

    def changed(self) -> tuple[torch.Tensor, int] | None:
        """A tensor that did not stay, and the version that it had."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                return tensor, version
        return None

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = [tensor.requires_grad for tensor in self._tensors]
        self._set(now, self._flags)
        return now

    def undo(self, now: Any) -> None:
        self._set(self._flags, now)

    def _set(self, old: list[bool], new: list[bool]) -> None:
        if old != new:
            for tensor, before, flag in zip(self._tensors, old, new, strict=True):
                if before != flag and tensor.is_leaf:
                    tensor.requires_grad_(flag)


# Copies of tensors, so that calls that find the same values share one.
_copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    key = id(tensor)
    if tensor.nbytes > _SMALL:
        return tensor.detach().clone()
    known = _copies.get(key)
    if known is None or known[0]() is not tensor or not same_bits(known[1], tensor):
        copy = tensor.detach().clone()
        known = _copies[key] = (weakref.ref(tensor, lambda _: _copies.pop(key, None)), copy)
    return known[1]


class _Contents(_Note):
    """A tensor whose values may be changed in place. `steady` has the names of those that were seen not to be."""

    __slots__ = ("_copy", "_steady", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, steady: tuple[set[str], str] | None) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._steady = steady
        self._copy = _copy_of(tensor)

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        if self._tensor.requires_grad:  # it has become a part of the graph
            return _Versions([self._tensor], [self._version])
        if self._copy.nbytes <= _SMALL or is_changed(self._tensor, self._version, self._copy):
            return self
        if self._steady is not None:
            self._steady[0].add(self._steady[1])
        return _Versions([self._tensor], [self._version])

    def put_back(self, held: list[torch.Tensor]) -> Any:
        if same_bits(self._tensor, self._copy):
            return None
        if self._tensor.shape != self._copy.shape:
            raise CheckpointError(
                f"a tensor of shape {tuple(self._copy.shape)} that the function uses was given the shape "
                f"{tuple(self._tensor.shape)}, so the rerun would not repeat it; make a new tensor instead"
            )
        now = self._tensor.detach().clone()
        self._tensor.data.copy_(self._copy)  # through `data` its version stays: for autograd nothing has happened
        return now

    def undo(self, now: Any) -> None:
        values = self._copy if now is None else now
        if not same_bits(self._tensor, values):
            self._tensor.data.copy_(values)


def may_be_copied(tensor: torch.Tensor, most: float = _SMALL) -> bool:
    """Whether the tensor is one that a function may change in place, and small enough to keep a copy of it."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and tensor.nbytes <= most
        and not tensor.is_inference()
        and 0 not in tensor.stride()
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

    def settled(self, held: list[torch.Tensor]) -> _Note | None:
        return None if self._array.tobytes() == self._before.tobytes() else self

    def put_back(self, held: list[torch.Tensor]) -> Any:
        now = self._array.copy()
        self._array[...] = self._before
        return now

    def undo(self, now: Any) -> None:
        self._array[...] = now


def _same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether the entries are the very same objects, under the same names."""
    return len(now) == len(then) and all(map(is_, now.values(), then.values())) and all(map(is_, now, then))


def _same_row(now: Any, then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _fill(owner: Any, entries: Any) -> None:
    owner.clear()
    if isinstance(owner, dict | set):
        owner.update(entries)
    else:
        owner.extend(entries)


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
    if torch.compiler.is_compiling():  # pragma: no cover  (it is traced, not run)
        return  # what is inside a compiled module was noted with it
    for notes in _meeting.notes:
        notes.find(module)


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
