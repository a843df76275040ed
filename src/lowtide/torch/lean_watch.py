"""What a call of a function depends on, found in microseconds: the forms of its tensors, its modules, its numbers.

A `Sight` has a key, equal for calls that do the same operations; numbers that calls may differ in, which are compared
one by one; and all tensors of arguments and modules, in which recipes find what they read. Modules are held by weak
references only.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

_NUMBERS = frozenset({int, float, complex})
_WORDS = frozenset(
    {bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type}
)
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_PLAIN = _NUMBERS | _WORDS
_ORDINARY = torch._C._disabled_torch_dispatch_impl
_OWN = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_casts = torch.is_autocast_enabled
_casts_to = torch.get_autocast_dtype
_default_dtype = torch.get_default_dtype


class Sight:
    """One call, as far as it can be told from outside.

    Attributes:
        key: what has to be equal.
        numbers: Python's numbers among arguments, and plain attributes of modules.
        tensors: those of arguments, then those of modules.
        arguments: how many are arguments.
        is_plain: whether there is nothing but ordinary tensors, and nothing compiled, which a trace would undo.
        anchors: what the key knows by identity.
    """

    __slots__ = ("_functions", "_key", "_modules", "anchors", "arguments", "is_plain", "key", "numbers", "tensors")

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._key: list[Any] = []
        self._modules: list[nn.Module] = []
        self._functions: set[int] = set()
        self.numbers: list[Any] = []
        self.tensors: list[Any] = []
        self.anchors: list[Any] = []
        self.is_plain = True
        self._see_function(function)
        for argument in args:
            self._see(argument)
        for name, argument in kwargs.items():
            self._key.append(name)
            self._see(argument)
        rows = [row for module in self._modules for row in self._see_attributes(module)]
        self.arguments = len(self.tensors)
        if self.arguments > 1:
            self._see_aliases()
        self._see_parameters(rows)
        cuda = (_casts("cuda"), _casts_to("cuda")) if _casts("cuda") else None
        self.key: Hashable = (*self._key, _casts("cpu") and _casts_to("cpu"), cuda, _default_dtype())

    def _see(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _TENSORS or isinstance(thing, torch.Tensor):
            self._see_tensor(thing)
        elif kind in _NUMBERS:
            self._key.append(kind)
            self.numbers.append(thing if thing else str(thing))  # 0.0 is not -0.0
        elif kind in _WORDS:
            self._key.append(thing)
        elif isinstance(thing, list | tuple):
            self._key += (kind, len(thing))
            for part in thing:
                self._see(part)
        elif isinstance(thing, dict):
            self._key += (kind, *thing)
            for part in thing.values():
                self._see(part)
        elif isinstance(thing, nn.Module):
            self._key.append(id(thing))
            self._modules.append(thing)
            self.anchors.append(thing)
        elif kind is slice:
            self._see((thing.start, thing.stop, thing.step))
        elif isinstance(thing, np.generic):
            self._key.append(kind)
            self.numbers.append(str(thing))
        elif isinstance(thing, Enum):
            self._key += (kind, thing.name)
        elif is_dataclass(thing) and not isinstance(thing, type):
            self._key.append(kind)
            for field in fields(thing):
                self._see(getattr(thing, field.name))
        else:
            self._see_function(thing)

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        self._key += (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides)
        self.tensors.append(tensor)
        kind = type(tensor)
        if tensor.is_inference() or (kind not in _TENSORS and kind.__torch_dispatch__ is not _ORDINARY):
            self.is_plain = False

    def _see_function(self, function: Any) -> None:
        if isinstance(function, nn.Module):
            self._see(function)
        elif isinstance(function, types.MethodType):
            self._see_function(function.__func__)
            self._see_function(function.__self__)
        elif isinstance(function, types.FunctionType):
            if id(function) in self._functions:  # it calls itself
                return
            self._functions.add(id(function))
            self.is_plain &= not hasattr(function, "_torchdynamo_orig_callable")
            self._key += (function.__code__, id(function.__globals__))
            for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._see(default)
            for cell in function.__closure__ or ():
                try:
                    self._see(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
        elif isinstance(function, functools.partial):
            self._see_function(function.func)
            self._see(function.args)
            self._see(function.keywords)
        else:
            self._key.append(id(function))
            self.anchors.append(function)

    def _see_attributes(self, root: nn.Module) -> list[tuple[Any, ...]]:
        """See numbers and tensors that modules have as attributes; gives what else they have."""
        parts = _parts.get(root)
        rows = None if parts is None else parts.rows()
        if parts is None or rows is None:
            parts = _parts[root] = _Parts(root)
            rows = parts.rows()
            assert rows is not None
        self.is_plain &= not parts.is_compiled
        attributes = [value for row in rows for value in row[len(_OWN) :]]
        if parts.has_tensors:
            for tensor in [value for value in attributes if isinstance(value, torch.Tensor)]:
                self._see_tensor(tensor)
            attributes = [value for value in attributes if not isinstance(value, torch.Tensor)]
        self.numbers += attributes
        return rows

    def _see_parameters(self, rows: list[tuple[Any, ...]]) -> None:
        own = [parameter for row in rows for parameter in row[1].values()]
        self._key += [None if p is None else (p.requires_grad, p.dtype) for p in own]
        self._key.append(tuple([len(row[3]) + len(row[4]) for row in rows]))
        self.tensors += own
        for row in rows:
            if row[2]:
                self.tensors += row[2].values()

    def _see_aliases(self) -> None:
        """Tensors with one storage, and where they lie in it."""
        places = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in self.tensors]
        if len(set(places)) < len(places):
            first = {place: k for k, place in reversed([*enumerate(places)])}
            self._key += ("aliases", *[(first[p], self._apart(k, first[p])) for k, p in enumerate(places)])

    def _apart(self, k: int, other: int) -> int:
        tensor, first = self.tensors[k], self.tensors[other]
        return int(tensor.storage_offset() - first.storage_offset()) if tensor.layout is torch.strided else 0


class _Parts:
    """A module and all inside it: where to look at each call."""

    def __init__(self, root: nn.Module) -> None:
        self.has_tensors = self.is_compiled = False
        self._modules: list[tuple[weakref.ref[nn.Module], itemgetter[Any], int, list[Any], list[type]]] = []
        for module in root.modules():
            inside = module.__dict__
            names = [name for name, value in inside.items() if type(value) in _PLAIN or isinstance(value, torch.Tensor)]
            kinds = [type(inside[name]) for name in names]
            children = [weakref.ref(child) if child is not None else None for child in module._modules.values()]
            self.has_tensors |= any(issubclass(kind, torch.Tensor) for kind in kinds)
            self.is_compiled |= module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            self._modules.append((weakref.ref(module), itemgetter(*_OWN, *names), len(inside), children, kinds))

    def rows(self) -> list[tuple[Any, ...]] | None:
        """For each module what `_OWN` names, and its attributes; None if they are not the same any more."""
        rows = []
        for reference, getter, size, children, kinds in self._modules:
            module = reference()
            if module is None:
                return None
            inside = module.__dict__
            try:
                row = getter(inside)
            except KeyError:
                return None
            if len(inside) != size or list(map(type, row[len(_OWN) :])) != kinds:
                return None
            if children and [*map(_referenced, row[0].values())] != children:
                return None
            rows.append(row)
        return rows


def _referenced(child: nn.Module | None) -> weakref.ref[nn.Module] | None:
    return None if child is None else weakref.ref(child)


_parts: weakref.WeakKeyDictionary[nn.Module, _Parts] = weakref.WeakKeyDictionary()
