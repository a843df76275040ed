"""Seconds of steps: small ones are timed without being watched, and those that are alike take the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import nn

from lowtide.chain import StepCost
from lowtide.torch.capture import now
from lowtide.torch.step_pull import pulled, seed_of
from lowtide.torch.storages import tensors_of
from lowtide.torch.traceless import Layer


def through(layers: Iterable[Layer], state: Any) -> Any:
    """Run layers one after the other."""
    for layer in layers:
        state = layer(state)
    return state


def timed(layers: list[Layer], state: Any, cost: StepCost) -> StepCost:
    """The cost with the seconds of the same again, unwatched, where that is less."""
    since, began = now(), perf_counter()
    seed = seed_of(through(layers, state))
    forward, backward = perf_counter() - began, 0.0
    if seed is not None:
        began = perf_counter()
        pulled(seed, [tensor for tensor in tensors_of(state) if tensor.requires_grad], since)
        backward = perf_counter() - began
    return replace(cost, forward=min(cost.forward, forward), backward=min(cost.backward, backward))


# How many of those that are alike are timed.
_OFTEN = 3


class Likeness:
    """What steps have in common that take the same time: their layers in words, and the forms of all they work on."""

    def __init__(self, layers: list[Layer], state: Any, cost: StepCost) -> None:
        tensors = tensors_of(state)
        forms = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        self.forward: Hashable = (tuple(map(_form, layers)), forms, cost.tape - cost.state)
        self.backward: Hashable = (self.forward, tuple(tensor.requires_grad for tensor in tensors))


def _form(layer: Layer) -> Hashable:
    if isinstance(layer, nn.Module):
        parameters = tuple((parameter.shape, parameter.requires_grad) for parameter in layer.parameters())
        return type(layer), repr(layer), parameters
    return id(layer)


class Seconds:
    """The seconds of a row of steps. Of those that are alike the least counts: the rest is noise."""

    def __init__(self) -> None:
        self._rows: list[tuple[Likeness, StepCost]] = []
        self._least: dict[Hashable, float] = {}
        self._times: Counter[Hashable] = Counter()

    def knows(self, likeness: Likeness) -> bool:
        """Whether enough steps like it have been added."""
        return self._times[likeness.backward] >= _OFTEN

    def add(self, likeness: Likeness, cost: StepCost) -> None:
        """Add the next step."""
        self._times[likeness.backward] += 1
        for key, seconds in ((likeness.forward, cost.forward), (likeness.backward, cost.backward)):
            self._least[key] = min(seconds, self._least.get(key, seconds))
        self._rows.append((likeness, cost))

    def evened(self) -> list[StepCost]:
        """The costs of all steps."""
        return [
            replace(cost, forward=self._least[likeness.forward], backward=self._least[likeness.backward])
            for likeness, cost in self._rows
        ]
