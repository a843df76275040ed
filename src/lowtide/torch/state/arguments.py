"""The arguments of a call, kept for reruns: tensors as autograd keeps them, anything mutable as a copy.

A list, a dict, a cache that the function adds to: a rerun has to find it as it was, and the user's own must not be
touched. So its structure is copied before the first run, and copied again for each rerun; its tensors are shared.
Modules, functions and objects of torch's own classes are what they are.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import sysconfig
import types
import weakref
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.errors import CheckpointError
from lowtide.torch.state.generators import KINDS as GENERATORS
from lowtide.torch.state.notes import is_changed, may_be_copied

# Nothing can be changed in these, and nothing that can be is reached through them.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, slice, range, types.ModuleType, types.FunctionType}
    | {types.BuiltinFunctionType, types.MethodType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType}
)
MOST_ENTRIES = 10_000  # of a container; a longer one is data
_MOST_DEPTH = 16
_FOREIGN = frozenset({"torch", "numpy", "lowtide", "builtins"})
_STDLIB = sysconfig.get_paths()["stdlib"]
_KEEPERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)  # of the standard library, for the user's
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType})
_ARRAYS = (np.ndarray, array, bytearray)
_SMALL_ARRAY = 1024 * 1024  # bytes


@functools.cache
def is_foreign(module_name: str | None) -> bool:
    """Whether a module of this name is one of torch's, numpy's or Python's own."""
    top = (module_name or "").partition(".")[0]
    if top not in sys.stdlib_module_names or top == "__main__":
        return top in _FOREIGN
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or file.startswith(_STDLIB)  # somebody's own `trace.py` is not


def is_plain_object(kind: type) -> bool:
    """Whether instances of the class are objects of the user's that keep attributes."""
    if issubclass(kind, _KEEPERS):
        return True
    if is_foreign(kind.__module__) or issubclass(kind, nn.Module | torch.Tensor | type | BaseException):
        return False
    return kind.__dictoffset__ != 0 or any("__slots__" in base.__dict__ for base in kind.__mro__)


# Iterators of which a copy goes on where they are. Those that stand on other iterators share them with their copies.
_ITERATORS = (itertools.count, itertools.repeat, *(type(iter(row)) for row in ([], (), "", range(0))))


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that can be copied."""
    return isinstance(value, _ITERATORS)


def slots_of(thing: Any) -> Iterator[Any]:
    """The descriptors of those attributes of an object for which its class has slots."""
    for kind in type(thing).__mro__:
        for descriptor in kind.__dict__.values() if "__slots__" in kind.__dict__ else ():
            if type(descriptor) is types.MemberDescriptorType:
                yield descriptor


def holds_modules(thing: Any) -> bool:
    """Whether an object has modules among its attributes, as a trainer has: then it is nobody's state."""
    return any(isinstance(value, nn.Module) for value in getattr(thing, "__dict__", {}).values())


_FOUND = (nn.Module, types.FunctionType, types.MethodType, functools.partial, *GENERATORS)


class _Place:
    """Where a tensor goes."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Structure:
    """A nested value without its tensors, copied so that nothing that happens to the value later changes it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any, tensors: list[torch.Tensor], found: list[Any]) -> None:
        """Copy a value; its tensors are appended to `tensors`, modules and generators in it to `found`."""

        def take(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                return _Place(len(tensors) - 1)
            if isinstance(leaf, _FOUND):
                found.append(leaf)
            return leaf

        self._value = _copied(value, take, {}, 0)

    def with_tensors(self, tensors: list[torch.Tensor]) -> Any:
        """A new value of this structure with these tensors."""
        return _copied(self._value, lambda leaf: tensors[leaf.number] if type(leaf) is _Place else leaf, {}, 0)


def _copied(value: Any, leaf: Any, memo: dict[int, Any], depth: int) -> Any:
    """A copy of a nested value whose leaves are what `leaf` returns for them; what occurs twice stays one."""
    kind = type(value)
    if kind in ATOMS:
        return leaf(value) if kind in _FUNCTIONS else value
    if id(value) in memo:
        return memo[id(value)]
    if depth > _MOST_DEPTH:
        return value

    def inner(part: Any) -> Any:
        return _copied(part, leaf, memo, depth + 1)

    if isinstance(value, tuple):
        parts = [inner(part) for part in value]
        return kind(*parts) if hasattr(kind, "_fields") else tuple.__new__(kind, parts)
    if isinstance(value, list | dict | set | deque):
        return value if len(value) > MOST_ENTRIES else _copied_container(value, inner, memo)
    if isinstance(value, _ARRAYS):
        return copy.copy(value) if memoryview(value).nbytes <= _SMALL_ARRAY else value
    if is_iterator(value):
        return copy.copy(value)
    if is_plain_object(kind) and not holds_modules(value):
        twin = memo[id(value)] = object.__new__(kind)
        _copy_attributes(value, twin, inner)
        return twin
    return leaf(value)


def _copied_container(value: Any, inner: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if isinstance(value, deque):
        twin = kind.__new__(kind)
        deque.__init__(twin, maxlen=value.maxlen)
    else:
        twin = kind.__new__(kind)
    memo[id(value)] = twin
    if isinstance(value, dict):
        for key in dict.keys(value):  # as they are stored: some make something of an entry whenever they are asked
            dict.__setitem__(twin, key, inner(dict.__getitem__(value, key)))
        if hasattr(value, "default_factory"):
            twin.default_factory = value.default_factory
    elif isinstance(value, set):
        set.update(twin, map(inner, value))
    else:
        (list if isinstance(value, list) else deque).extend(twin, map(inner, value))
    if not is_foreign(kind.__module__):
        _copy_attributes(value, twin, inner)
    return twin


def _copy_attributes(value: Any, twin: Any, inner: Any) -> None:
    if type(value).__dictoffset__:
        vars(twin).update({name: inner(part) for name, part in vars(value).items()})
    for descriptor in slots_of(value):
        try:
            part = descriptor.__get__(value)
        except AttributeError:  # not set
            continue
        descriptor.__set__(twin, inner(part))


class _Kept(torch.autograd.Function):
    """A node that saves tensors the way autograd does, through the hooks of the calls around."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


_anchor = torch.empty(0, requires_grad=True)


class KeptTensors:
    """Tensors kept for reruns: by themselves, or, inside other hooks, the way autograd saves them."""

    __slots__ = ("_changed", "_firsts", "_flags", "_node", "_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor], through_hooks: bool) -> None:
        # Where a tensor was given first: attention, for one, asks whether its query is its key.
        places: dict[int, int] = {}
        self._firsts = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
        self._flags = flags = [tensor.requires_grad for tensor in tensors]
        # Copies of those that the function changes in place; until it has run, of those that it may change.
        self._changed: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        if not all(flags):
            self._changed = {k: (t, t._version, t.clone()) for k, t in enumerate(tensors) if may_be_copied(t)}
        self._node: Any = None
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        if through_hooks and tensors and not any(tensor.is_inference() for tensor in tensors):
            self._node = _Kept.apply(_anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]  # torch's own
            return
        for tensor, needs_grad in zip(tensors, flags, strict=True):
            # Of a computed tensor only its values: the tensor itself may become a part of the graph that keeps it.
            self._tensors.append(tensor if needs_grad and tensor.is_leaf else tensor.detach())
            self._versions.append(tensor._version if needs_grad or not tensor.is_inference() else -1)

    def settle(self) -> None:
        """The function has run."""
        if self._changed:
            self._changed = {k: note for k, note in self._changed.items() if is_changed(*note)}

    def again(self) -> list[torch.Tensor]:
        """Twins of the tensors that belong to no graph, or an error if one was changed."""
        if self._node is not None:
            twins = [_twin(*pair) for pair in zip(self._node.saved_tensors, self._flags, strict=True)]
        else:
            twins = []
            for tensor, needs_grad, version in zip(self._tensors, self._flags, self._versions, strict=True):
                if version >= 0 and tensor._version != version and len(twins) not in self._changed:
                    raise CheckpointError(
                        f"argument tensor {len(twins)} of shape {tuple(tensor.shape)} was changed in place by the "
                        f"function or since it ran (version {version} then, {tensor._version} now), so the rerun would "
                        "not repeat it; change it after the backward, or make a new tensor"
                    )
                twins.append(_twin(tensor, needs_grad))
        for number, (_, _, values) in self._changed.items():
            if self._firsts[number] == number:
                twins[number] = values.clone()
        return [twins[first] for first in self._firsts]  # one that was given twice is one


def _twin(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    """The tensor itself, if it is a leaf that belongs to no graph, or one with its values that is such a leaf."""
    return tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach().requires_grad_(needs_grad)
