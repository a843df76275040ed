"""The two front ends behind one face: arrays in, a loss and its gradients out, as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import lowtide.jax
import lowtide.torch
from tests.jax.networks import quick

Gradients = list[np.ndarray[Any, np.dtype[np.float64]]]


@dataclass(frozen=True)
class Side:
    """One front end and its framework."""

    lt: Any
    tanh: Callable[[Any], Any]
    array: Callable[[Any], Any]
    gradients: Callable[[Callable[..., Any], list[Any]], tuple[float, Gradients]]


def _by_torch(fn: Callable[..., Any], arrays: list[Any]) -> tuple[float, Gradients]:
    leaves = [torch.tensor(array, requires_grad=True) for array in arrays]
    loss = fn(*leaves)
    return float(loss.detach()), [grad.numpy() for grad in torch.autograd.grad(loss, leaves)]


def _by_jax(fn: Callable[..., Any], arrays: list[Any]) -> tuple[float, Gradients]:
    with jax.enable_x64():
        loss, grads = quick(jax.value_and_grad(fn, tuple(range(len(arrays)))))(*map(jnp.asarray, arrays))
        return float(loss), [np.asarray(grad) for grad in grads]


SIDES = {
    "torch": Side(lowtide.torch, torch.tanh, torch.tensor, _by_torch),
    "jax": Side(lowtide.jax, jnp.tanh, jnp.asarray, _by_jax),
}
