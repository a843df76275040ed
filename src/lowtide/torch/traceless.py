"""Layers run for the sake of measuring, which leaves no trace: in modules, generators or gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.torch import recording
from lowtide.torch.ambient import Ambient, Randomness
from lowtide.torch.hidden import Hidden

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
    try:
        with hidden.meeting_modules():
            yield
    finally:
        hidden.undo()


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
