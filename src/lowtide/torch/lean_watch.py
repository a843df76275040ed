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
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_NUMBERS = frozenset({int, float, complex})
_WORDS = frozenset(
    {
        bool,
        str,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        range,
        type,
    }
)
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_PLAIN = _NUMBERS | _WORDS
_FEW = 64
_SEEN_IN_OBJECTS = (torch.Tensor, nn.Module, types.FunctionType, types.MethodType, functools.partial)
_ORDINARY = torch._C._disabled_torch_dispatch_impl
_INTERNAL = frozenset(nn.Module().__dict__)
# Modules whose attributes change nothing about what they do.
_TELLING_NOTHING = frozenset({nn.Linear, nn.Identity, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ModuleList, nn.Sequential})
# What modules have: attributes, the numbers that hooks have, parameters, buffers.
_Found = tuple[list[Any], list[int], list[dict[str, Any]], list[dict[str, Any]]]
_hooks = itemgetter("_forward_pre_hooks", "_forward_hooks")
_needs_gradient = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
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
        anchors: modules, which the key knows by identity.
    """

    __slots__ = (
        "_has_parameters",
        "_key",
        "_modules",
        "_seen",
        "anchors",
        "arguments",
        "is_plain",
        "key",
        "numbers",
        "tensors",
    )

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._key: list[Any] = []
        self._modules: list[nn.Module] = []
        self._seen: set[int] = set()
        self.numbers: list[Any] = []
        self.tensors: list[Any] = []
        self.anchors: list[nn.Module] = []
        self.is_plain = True
        self._has_parameters = False
        self._see_function(function)
        for argument in args:
            self._see(argument)
        for name, argument in kwargs.items():
            self._key.append(name)
            self._see(argument)
        found = [self._see_attributes(module) for module in self._modules]
        self.arguments = len(self.tensors)
        if self.arguments > 1:
            self._see_aliases()
        for each in found:
            self._see_parameters(each)
        cuda = (_casts("cuda"), _casts_to("cuda")) if _casts("cuda") else None
        self.key: Hashable = (*self._key, _casts("cpu") and _casts_to("cpu"), cuda, _default_dtype())

    def _see(self, thing: Any) -> None:
        kind = type(thing)
        if kind in _TENSORS:
            self._see_tensor(thing)
        elif kind in _NUMBERS:
            self._key.append(kind)
            self.numbers.append(thing if thing else str(thing))  # 0.0 is not -0.0
        elif kind in _WORDS:
            self._key.append(thing)
        elif isinstance(thing, tuple):
            self._key += (kind, len(thing))
            for part in thing:
                self._see(part)
        elif isinstance(thing, list | dict):
            self._see_container(thing)
        elif isinstance(thing, torch.Tensor):
            self._see_tensor(thing)
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
                self._see(getattr(thing, field.name, None))
        else:
            self._see_function(thing)

    def _see_container(self, thing: list[Any] | dict[Any, Any]) -> None:
        if id(thing) in self._seen:  # it may contain itself
            return
        self._seen.add(id(thing))
        self._key += (type(thing), len(thing))
        if isinstance(thing, dict):
            self._key += thing
        for part in thing.values() if isinstance(thing, dict) else thing:
            self._see(part)

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested:
            self.is_plain = False
            return
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
        self._key += (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides)
        self.tensors.append(tensor)
        kind = type(tensor)
        self._has_parameters |= kind is nn.Parameter
        if tensor.is_inference() or (kind not in _TENSORS and not _is_ordinary(tensor)):
            self.is_plain = False

    def _see_function(self, function: Any) -> None:
        if isinstance(function, nn.Module):
            self._key.append(id(function))
            self._modules.append(function)
            self.anchors.append(function)
        elif isinstance(function, types.MethodType):
            self._see_function(function.__func__)
            self._see(function.__self__)
        elif isinstance(function, types.FunctionType):
            if id(function) in self._seen:  # it calls itself
                return
            self._seen.add(id(function))
            self.is_plain &= not hasattr(function, "_torchdynamo_orig_callable")
            self._key += (function.__code__, id(function.__globals__))
            self.numbers += [repr(function.__globals__.get(name)) for name in numbers_outside(function)]
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
        elif isinstance(function, types.BuiltinFunctionType | types.MethodDescriptorType):
            self._key.append(function.__qualname__)
            owner = getattr(function, "__self__", None)
            if isinstance(owner, torch.Tensor):
                self._see(owner)
        else:
            self._see_object(function)

    def _see_object(self, thing: Any) -> None:
        """Something of the user's own: known by its type, and by numbers, tensors, modules and functions that it has.

        Not by identity: one that is made anew for every call would make each call another one.
        """
        self._key.append(type(thing))
        self.is_plain &= not isinstance(thing, torch.jit.ScriptFunction)
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        for name, value in list(getattr(thing, "__dict__", {}).items()):
            if type(value) in _PLAIN:
                self._key.append(name)
                self.numbers.append(value)
            elif isinstance(value, _SEEN_IN_OBJECTS):
                self._key.append(name)
                self._see(value)

    def _see_attributes(self, root: nn.Module) -> _Found:
        """See numbers and tensors that modules have as attributes; gives what else they have."""
        reference, parts = _parts.get(id(root), (None, None))
        if reference is None or reference() is not root:
            parts = None
        found = None if parts is None else parts.look()
        if parts is None or found is None:
            parts = _Parts(root)
            _parts[id(root)] = weakref.ref(root, functools.partial(_forget, id(root))), parts
            found = parts.look()
            assert found is not None
        attributes = found[0]
        self.is_plain &= not parts.is_compiled
        if parts.has_tensors:
            for tensor in [value for value in attributes if isinstance(value, torch.Tensor)]:
                self._see_tensor(tensor)
            attributes = [value for value in attributes if not isinstance(value, torch.Tensor)]
        self.numbers += attributes
        if parts.outside:
            self.numbers += [repr(names.get(name)) for names, name in parts.outside]
        return found

    def _see_parameters(self, found: _Found) -> None:
        _, hooks, own, buffers = found
        parameters = [p for row in own for p in row.values() if p is not None]
        if not _TENSORS.issuperset(map(type, parameters)):
            self.is_plain &= all(map(_is_ordinary, parameters))
        if self._has_parameters:  # perhaps one of those
            arguments = self.tensors[: self.arguments]
            self._key += [k for k, p in enumerate(parameters) if any(p is argument for argument in arguments)]
        self._key += (tuple(hooks), tuple(map(_needs_gradient, parameters)), tuple(map(_dtype, parameters)))
        self.tensors += parameters
        if buffers:
            self.tensors += [buffer for row in buffers for buffer in row.values()]

    def _see_aliases(self) -> None:
        """Tensors with one storage, and where they lie in it."""
        places = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in self.tensors]
        if len(set(places)) < len(places):
            first = {place: k for k, place in reversed([*enumerate(places)])}
            self._key += ("aliases", *[(first[p], self._apart(k, first[p])) for k, p in enumerate(places)])

    def _apart(self, k: int, other: int) -> int:
        tensor, first = self.tensors[k], self.tensors[other]
        return int(tensor.storage_offset() - first.storage_offset()) if tensor.layout is torch.strided else 0


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether operations on it are torch's own, and it has values."""
    return type(tensor).__torch_dispatch__ is _ORDINARY and not is_lazy(tensor)


class _Parts:
    """A module and all inside it: where to look at each call."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
        if scripted:  # they have other insides, and are called plainly
            modules = []
        inside = [module.__dict__ for module in modules]
        told = [k for k, module in enumerate(modules) if type(module) not in _TELLING_NOTHING]
        names = [[name for name in inside[k] if name == "training" or _is_watched(name, inside[k][name])] for k in told]
        self._references = [weakref.ref(module) for module in modules]
        self._sizes = list(map(len, inside))
        self._told = told
        # Of one name an itemgetter would give no tuple.
        self._attributes = [itemgetter(*row) if len(row) > 1 else itemgetter(*row, *row) for row in names]
        self._parents = [k for k, module in enumerate(modules) if module._modules]
        self._holders = [k for k, module in enumerate(modules) if module._parameters]
        self._buffered = [k for k, module in enumerate(modules) if module._buffers]
        found = [get(inside[k]) for get, k in zip(self._attributes, told, strict=True)]
        self._kinds = [type(value) for row in found for value in row]
        self._children = [id(child) for module in modules for child in module._modules.values()]
        calls = {type(module).forward for module in modules}
        self.outside = [
            (call.__globals__, name)
            for call in calls
            if isinstance(call, types.FunctionType)
            for name in numbers_outside(call)
        ]
        self.has_tensors = any(issubclass(kind, torch.Tensor) for kind in self._kinds)
        self.is_compiled = scripted or any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule" for module in modules
        )

    def look(self) -> _Found | None:
        """What is there now; None if it is not the same any more."""
        try:
            # A module that is gone has no attributes.
            inside = [reference().__dict__ for reference in self._references]
            rows = [get(inside[k]) for get, k in zip(self._attributes, self._told, strict=True)]
        except (AttributeError, KeyError):
            return None
        attributes = list(chain.from_iterable(rows))
        if (
            list(map(len, inside)) != self._sizes
            or list(map(type, attributes)) != self._kinds
            or [id(child) for k in self._parents for child in inside[k]["_modules"].values()] != self._children
        ):
            return None
        hooks = list(chain.from_iterable(chain.from_iterable(map(_hooks, inside))))
        own = [inside[k]["_parameters"] for k in self._holders]
        return attributes, hooks, own, [inside[k]["_buffers"] for k in self._buffered]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Every name that the code may look up outside."""
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inside))


def numbers_outside(function: types.FunctionType) -> list[str]:
    """Globals that the function names, and that are numbers or a few of them."""
    names = function.__globals__
    return sorted(name for name in _names_in(function.__code__) if name in names and _is_number(names[name]))


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple | dict) and len(value) <= _FEW:
        return all(type(part) in _NUMBERS for part in (value.values() if isinstance(value, dict) else value))
    return type(value) in _NUMBERS or isinstance(value, np.generic)


def _is_watched(name: str, value: Any) -> bool:
    if name in _INTERNAL:
        return False
    if type(value) is tuple:
        return all(type(part) in _PLAIN for part in value)
    return type(value) in _PLAIN or isinstance(value, torch.Tensor | np.generic | Enum)


# By identity, because a module may not be hashable.
_parts: dict[int, tuple[weakref.ref[nn.Module], _Parts]] = {}


def _forget(key: int, _: object) -> None:
    _parts.pop(key, None)
