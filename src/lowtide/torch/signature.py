"""What a row of layers was found to cost, kept for the next call with the same layers and an input of the same form.

Layers are known by identity and held by weak references only: a model that is gone takes its entry with it.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

Layer = Callable[[Any], Any]
V = TypeVar("V")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def signature(layers: list[Layer], x: Any) -> Hashable:
    """Everything that what layers cost may depend on, but for the numbers in their tensors."""
    leaves, form = tree_flatten(x)
    return (
        tuple(_identity(layer) for layer in layers),
        tuple(_module_form(module) for layer in layers for module in _modules(layer)),
        str(form),
        tuple(_leaf_form(leaf) for leaf in leaves),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.get_default_dtype(),
    )


def _identity(layer: Layer) -> Hashable:
    """A method is made anew each time it is looked up: it is known by its object and its function."""
    if isinstance(layer, types.MethodType):
        return id(layer.__self__), id(layer.__func__)
    return id(layer)


def _modules(layer: Any) -> Iterator[nn.Module]:
    """Modules that the layer is, or holds directly."""
    if isinstance(layer, nn.Module):
        yield from layer.modules()
    elif isinstance(layer, types.MethodType):
        yield from _modules(layer.__self__)
    elif isinstance(layer, functools.partial):
        for part in (layer.func, *layer.args, *layer.keywords.values()):
            yield from _modules(part)
    elif isinstance(layer, types.FunctionType):
        for cell in layer.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if isinstance(held, nn.Module):
                yield from held.modules()


def _module_form(module: nn.Module) -> Hashable:
    parameters = tuple(None if p is None else (p.requires_grad, p.dtype, p.device) for p in module._parameters.values())
    return id(module), module.training, parameters


def _leaf_form(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return leaf.shape, strides, leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad
    return leaf if isinstance(leaf, _PLAIN) else id(leaf)


def _references(layers: list[Layer]) -> list[weakref.ref[Any]] | None:
    """Weak references to the layers; None if one of them cannot have one."""
    things: list[Any] = []
    for layer in layers:
        if isinstance(layer, types.MethodType):
            things += [layer.__self__, layer.__func__]
        elif not isinstance(layer, types.MethodDescriptorType):  # such as torch.Tensor.tanh, which is there for good
            things.append(layer)
    try:
        return [weakref.ref(thing) for thing in things]
    except TypeError:
        return None


def _are_there(references: list[weakref.ref[Any]]) -> bool:
    """Whether all are alive. An identity may belong to another object once its first owner is gone."""
    return all(reference() is not None for reference in references)


class Known(Generic[V]):
    """The last `most` values, by signature."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[list[weakref.ref[Any]], V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, layers: list[Layer], x: Any, make: Callable[[], V]) -> V:
        """The value for these layers, made if it is not known."""
        key = signature(layers, x)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and _are_there(entry[0]):
                self._entries.move_to_end(key)
                return entry[1]
        value = make()
        references = _references(layers)
        if references is not None:
            with self._lock:
                self._forget_the_gone()
                self._entries[key] = (references, value)
                while len(self._entries) > self._most:
                    self._entries.popitem(last=False)
        return value

    def _forget_the_gone(self) -> None:
        for key in [key for key, (references, _) in self._entries.items() if not _are_there(references)]:
            del self._entries[key]
