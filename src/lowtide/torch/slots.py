"""Places where a step may keep state outside its arguments, and how they are found.

A slot is an attribute or a buffer of a module, an attribute of an object of the user's own, or a variable that a
function closes over. They are looked for in the step function itself and what it refers to; modules that it calls
in other ways are met when they are called.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

MISSING = object()
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
# Nobody keeps state of the user's in these packages, and following their functions would lead through all of them.
_FOREIGN = frozenset({"torch", "numpy", "lowtide", "builtins"}) | sys.stdlib_module_names - {"__main__"}


class Slot(Protocol):
    """A place that holds a value."""

    @property
    def label(self) -> str:
        """What messages call it."""

    @property
    def in_module(self) -> bool:
        """Whether it belongs to a module."""

    def get(self) -> Any:
        """The value, or MISSING."""

    def set(self, value: Any) -> None:
        """Put a value there; MISSING removes what is there."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One entry of a dictionary, such as a module's buffers or an object's attributes."""

    mapping: dict[str, Any]
    key: str
    label: str
    in_module: bool

    def get(self) -> Any:
        return self.mapping.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        if value is MISSING:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class _Variable:
    """A variable that a function closes over."""

    cell: types.CellType
    label: str
    in_module: bool = False

    def get(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not bound yet
            return MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


class Slots:
    """All slots found so far. `met` is called with each new one before any step has run that could change it."""

    def __init__(self, roots: Iterable[Any], met: Callable[[Slot], None]) -> None:
        self._met = met
        self._known: set[tuple[int, str]] = set()
        self._owners: list[tuple[dict[str, Any], str, bool]] = []
        self._modules: dict[int, nn.Module] = {}
        self.parameters: dict[int, str] = {}
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        for root in roots:
            self._find(root, "", seen)

    def new_entries(self) -> Iterator[Slot]:
        """Slots of known owners that have come up since the last time; `met` is not called with them."""
        for mapping, path, in_module in self._owners:
            for key in list(mapping):
                if key not in _MODULE_INTERNALS and (id(mapping), key) not in self._known:
                    self._known.add((id(mapping), key))
                    yield _Entry(mapping, key, f"{path}.{key}", in_module)

    @contextmanager
    def meeting_modules(self) -> Iterator[None]:
        """Inside, every module that is called for the first time is met before it runs."""
        thread = get_ident()

        def meet(module: nn.Module, _: Any) -> None:
            if get_ident() == thread and id(module) not in self._modules:
                self._see_module(module, type(module).__name__)

        handle = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def modules(self) -> list[nn.Module]:
        """Every module that takes part."""
        return list(self._modules.values())

    def _find(self, thing: Any, label: str, seen: set[int]) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            self._see_module(thing, label or type(thing).__name__)
        elif isinstance(thing, torch.Generator):
            self.generators.append(thing)
        elif isinstance(thing, torch.Tensor):
            self.tensors.append(thing)
        elif isinstance(thing, tuple | list):
            for part in thing[:100]:
                self._find(part, label, seen)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._find(part, label, seen)
        elif isinstance(thing, types.MethodType):
            self._find(thing.__self__, label, seen)
            self._find(thing.__func__, label, seen)
        elif isinstance(thing, types.FunctionType):
            if not _is_foreign(thing.__module__):
                self._find_in_function(thing, seen)
        elif _is_users_object(thing):
            path = label or type(thing).__name__
            self._see_mapping(vars(thing), path, in_module=False)
            for name, value in list(vars(thing).items()):
                self._find(value, f"{path}.{name}", seen)

    def _find_in_function(self, function: types.FunctionType, seen: set[int]) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            slot = _Variable(cell, name)
            if (id(cell), "") not in self._known:
                self._known.add((id(cell), ""))
                self._met(slot)
            self._find(slot.get(), name, seen)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                self._find(function.__globals__[name], name, seen)

    def _see_module(self, module: nn.Module, label: str) -> None:
        for path, child in module.named_modules(prefix=label):
            if id(child) in self._modules:
                continue
            self._modules[id(child)] = child
            self._see_mapping(child._buffers, path, in_module=True)
            self._see_mapping(vars(child), path, in_module=True)
            self.generators += [value for value in vars(child).values() if isinstance(value, torch.Generator)]
            for name, parameter in child.named_parameters(recurse=False):
                self.parameters.setdefault(id(parameter), f"{path}.{name}")

    def _see_mapping(self, mapping: dict[str, Any], path: str, in_module: bool) -> None:
        self._owners.append((mapping, path, in_module))
        for key in mapping:
            if key not in _MODULE_INTERNALS and (id(mapping), key) not in self._known:
                self._known.add((id(mapping), key))
                self._met(_Entry(mapping, key, f"{path}.{key}", in_module))


def _is_foreign(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in _FOREIGN


def _is_users_object(thing: Any) -> bool:
    """An instance of a class of the user's own that can keep attributes."""
    return (
        hasattr(thing, "__dict__")
        and not isinstance(thing, torch.Tensor | type | types.ModuleType)
        and not _is_foreign(type(thing).__module__)
    )
