"""Layers run for the sake of measuring, which leaves no trace: in modules, generators or gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.torch import recording
from lowtide.torch.ambient import Ambient, Randomness
from lowtide.torch.hidden import Hidden
from lowtide.torch.slots import MODULE_INTERNALS
from lowtide.torch.stand_in import StandIn

Layer = Callable[[Any], Any]


@contextmanager
def aside(layers: list[Layer]) -> Iterator[None]:
    """Inside, layers run with grad, and random numbers and gradients are put back afterwards."""
    hidden = Hidden(layers)
    with (
        torch.enable_grad(),
        Ambient().uncached(),
        recording.recomputing(),
        Randomness(hidden.generators).aside(),
        _other_randomness_aside(),
        _gradients_aside(hidden.modules),
    ):
        yield


@contextmanager
def left_as_it_was(layers: list[Layer]) -> Iterator[None]:
    """Inside, the layers may change what they keep; afterwards it is as it was."""
    hidden = Hidden(layers)
    hooks = [(found, dict(found)) for module in hidden.modules for found in _hooks_of(module)]
    try:
        with hidden.meeting_modules():
            yield
    finally:
        hidden.undo()
        for found, before in hooks:
            if found.keys() != before.keys():
                found.clear()
                found.update(before)


def _hooks_of(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Where a module has its hooks, which some register in their first forward."""
    for name, value in module.__dict__.items():
        if "_hooks" in name and isinstance(value, dict):
            yield value


@contextmanager
def _gradients_aside(modules: list[nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradient yet; afterwards they have the one they had."""
    held = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


@contextmanager
def _other_randomness_aside() -> Iterator[None]:
    """Inside, anything may be drawn from the generators of Python and numpy; afterwards they are where they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what layers use)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


class RandomStates:
    """Where the generators of torch, Python and numpy are, and those of modules, to start again from there."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers
        self._of_torch = Randomness(Hidden(layers).generators)
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what layers use)
        found = [
            value
            for layer in layers
            if isinstance(layer, nn.Module)
            for module in layer.modules()
            for value in vars(module).values()
        ]
        self._pythons = [(value, value.getstate()) for value in found if isinstance(value, random.Random)]
        self._numpys = [(v, v.bit_generator.state) for v in found if isinstance(v, np.random.Generator)]

    def seeded(self, seed: int) -> RandomStates:
        """Other states, for this seed; those of modules are the same."""
        self.restore()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return RandomStates(self._layers)

    def restore(self) -> None:
        """Put them back."""
        self._of_torch.restore(self._of_torch.start)
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)  # noqa: NPY002
        for own, state in self._pythons:
            own.setstate(state)
        for generator, of_bits in self._numpys:
            generator.bit_generator.state = of_bits


@contextmanager
def objects_aside(model: nn.Module) -> Iterator[None]:
    """Inside, attributes of plain objects that modules have may change; afterwards they are as they were."""
    held = [
        (vars(value), dict(vars(value)))
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in MODULE_INTERNALS and hasattr(value, "__dict__") and not isinstance(value, _NO_OBJECTS)
    ]
    try:
        yield
    finally:
        for attributes, before in held:
            attributes.clear()
            attributes.update(before)


# What has attributes, and is not an object that keeps state for a module.
_NO_OBJECTS = (type, FunctionType, MethodType, ModuleType, torch.Tensor, nn.Module, StandIn)
