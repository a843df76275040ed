"""Modules that have nothing but numbers, parameters, buffers and modules in them, compared in one go.

Most modules are of that kind, and stay as they are. To note each by itself takes longer than many of them take to run.
So the entries of all their dictionaries are remembered in one row, and while all are the very same objects, one note,
made once, serves every call.
"""

from __future__ import annotations

import types
import weakref
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lowtide.torch.state.notes import INSIDE, Note, has_version, notes_of
from lowtide.torch.state.structure import ATOMS, MODULE_INTERNALS, is_foreign
from lowtide.torch.state.surroundings import generators_named_in

_OBJECTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_is_trained = attrgetter("requires_grad")
_MAY_HOLD = (types.FunctionType, types.MethodType)


class PlainModules(Note):
    """Such a module, the first, and all that are inside, as they were."""

    __slots__ = ("_dictionaries", "_empty", "_keys", "_lengths", "_notes", "_trained", "_values", "ids", "with_tensors")

    def __init__(self, modules: list[nn.Module]) -> None:
        self.ids = [id(module) for module in modules]
        # Those with buffers, or parameters that are not trained: their values are noted at every call.
        self.with_tensors = [module for module in modules if _has_more_to_note(module)]
        self._trained = list(filter(_is_trained, modules[0].parameters()))
        self._notes = [note for module in modules for note in notes_of(module)]
        inside = [vars(module)[name] for module in modules for name in INSIDE]
        self._empty = [entries for entries in inside if not entries]
        self._dictionaries = [*map(vars, modules), *(entries for entries in inside if entries)]
        self._lengths = list(map(len, self._dictionaries))
        self._keys = list(chain.from_iterable(self._dictionaries))
        self._values = list(chain.from_iterable(map(dict.values, self._dictionaries)))

    def is_now(self) -> bool:
        """Whether they are as they were."""
        dictionaries = self._dictionaries
        return (
            not any(self._empty)
            and list(map(len, dictionaries)) == self._lengths
            and all(map(is_, chain.from_iterable(map(dict.values, dictionaries)), self._values))
            and list(chain.from_iterable(dictionaries)) == self._keys
        )

    def may_serve(self) -> bool:
        """Whether a call may have this note: they are as they were, and no parameter was frozen since."""
        return all(map(_is_trained, self._trained)) and self.is_now()

    def put_back(self, held: list[torch.Tensor]) -> Any:
        """Put back what has changed; in most calls nothing has."""
        return None if self.is_now() else [note.put_back(held) for note in self._notes]

    def undo(self, now: Any) -> None:
        """Undo that, and what the rerun itself has changed."""
        if now is None:
            if self.is_now():
                return
            now = [note.before for note in self._notes]
        for note, present in zip(reversed(self._notes), reversed(now), strict=True):
            note.undo(present)


_remembered: dict[int, tuple[weakref.ref[nn.Module], PlainModules]] = {}


def plain_modules(root: nn.Module) -> PlainModules | None:
    """A note of a module and all that are inside; None if one of them is not of this kind."""
    known = _remembered.get(id(root))
    if known is not None and known[0]() is root and known[1].may_serve():
        return known[1]
    _remembered.pop(id(root), None)
    modules, seen = [root], {id(root)}  # by identity: some classes make something else of a comparison
    for module in modules:
        if not _is_plain(module):
            return None
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    key, note = id(root), PlainModules(modules)
    forget = _remembered.pop  # the module may outlive our names
    _remembered[key] = (weakref.ref(root, lambda _: forget(key, None)), note)
    return note


def _has_more_to_note(module: nn.Module) -> bool:
    """Whether a module has tensors that a run may write to, or names random generators."""
    parameters = [p for p in module._parameters.values() if p is not None]
    steady = all(parameter.requires_grad and has_version(parameter) for parameter in parameters)
    return bool(module._buffers) or not steady or bool(generators_named_in(type(module)))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has nothing that could hold it: what is remembered is not freed before the module is."""
    if isinstance(module, torch.jit.ScriptModule | LazyModuleMixin):
        return False
    attributes, forward = vars(module), type(module).forward
    if str(forward.__module__).startswith("torch.distributed") or "_is_fsdp_managed_module" in attributes:
        return False  # pragma: no cover  (FSDP: run by tests in processes of their own)
    if any(attributes[name] for name in _OBJECTS) or "parametrizations" in module._modules:
        return False
    return all(name in MODULE_INTERNALS or _is_simple(value) for name, value in attributes.items())


def _is_simple(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and is_foreign(value.__module__)
    if type(value) is tuple:
        return all(map(_is_simple, value))
    return type(value) in ATOMS and not isinstance(value, _MAY_HOLD)
