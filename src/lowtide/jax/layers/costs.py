"""The costs of layers, from their types alone: bytes as XLA would lay them out, and floating point operations.

What the plain call holds too is not counted: parameters, their gradients, and values that depend on parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from lowtide.chain import Chain, StepCost, Working
from lowtide.jax.layers.trace import Layer
from lowtide.jax.xla.jaxprs import Leaves, is_float, nbytes, replaced
from lowtide.jax.xla.memory import Liveness, XlaGraph


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The costs of one layer, or of several in a row.

    Attributes:
        state: bytes of its input.
        held: bytes of its tape without its input, and without its results, which are the input of what follows.
        reads_input: whether its backward needs its input.
        advance: the most bytes while it runs.
        taping: the most bytes while it runs and keeps its tape.
        backward: the most bytes while it is pulled back.
        forward_work: floating point operations of running it.
        backward_work: floating point operations of pulling it back.
        cotangent: bytes of the gradient of its input.
    """

    state: int
    held: int
    reads_input: bool
    advance: int
    taping: int
    backward: int
    forward_work: float
    backward_work: float
    cotangent: int

    def step(self) -> StepCost:
        """The same costs as a step of a chain."""
        state = max(self.state, 1)
        tape = state + self.held
        working = Working(self.advance, max(self.taping - tape, 0), max(self.backward - tape, 0))
        return StepCost(state, tape, self.forward_work, self.backward_work, cotangent=self.cotangent, working=working)


def cost_of(layers: Sequence[Layer], *, first: bool = False, last: bool = False) -> LayerCost:
    """The costs of layers in a row, if gradients are taken of all floats in their closures and input.

    Args:
        layers: one or more.
        first: whether they begin the chain, so that the gradient of their input, if any, is a result of the program.
        last: whether they end the chain. If not, their results are not needed when they are run again to be taped, and
            XLA computes only those that the backward reads.
    """
    vjp = _Vjp(layers)
    forward = vjp.forward()
    backward = vjp.backward(forward)
    graph = XlaGraph()
    consts, x = graph.values(vjp.consts), graph.values(vjp.x)
    made = graph.add(forward, [*consts, *x])
    out, residuals = made[: len(vjp.out)], made[len(vjp.out) :]
    middle = len(graph.ops)
    given = graph.values(vjp.out[k] for k in vjp.active)
    gradients = graph.add(backward, [*residuals, *given])
    end = len(graph.ops)

    weights = [value for value, aval in zip(consts, vjp.consts, strict=True) if is_float(aval)]
    before = [value for value, k in zip(gradients, vjp.moving, strict=True) if k >= len(consts)]
    free = {*consts, *graph.made_of(weights), *gradients}.difference(() if first else before)
    alone = Liveness(graph, middle, x, dict.fromkeys(out, middle - 1))
    both = Liveness(graph, end, [*x, *given], dict.fromkeys(out, middle - 1) | dict.fromkeys(gradients, end))
    needed = both.across(middle) - free - {*given}
    unasked = set[int]() if last else {*out} - needed
    return LayerCost(
        state=nbytes(vjp.x),
        held=sum(graph.bytes[value] for value in needed.difference(x, out)),
        reads_input=not needed.isdisjoint(x),
        advance=alone.peak(0, middle, free),
        taping=both.peak(0, middle, free | {*given} | unasked),
        backward=both.peak(middle, end, free),
        forward_work=graph.work(0, middle),
        backward_work=graph.work(middle, end),
        cotangent=0 if first else nbytes(aval for aval in vjp.x if is_float(aval)),
    )


class _Vjp:
    """Layers in a row as two jaxprs: one that also returns their residuals, and one that pulls back from these."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self.consts = [var.aval for layer in layers for var in layer.jaxpr.constvars]
        self.x, self.out = list(layers[0].given), list(layers[-1].made)
        self.moving = [k for k, aval in enumerate((*self.consts, *self.x)) if is_float(aval)]
        self.active = [k for k, aval in enumerate(self.out) if is_float(aval)]

    def forward(self) -> core.Jaxpr:
        jaxpr: core.Jaxpr = jax.make_jaxpr(self._run)(*self.consts, *self.x).jaxpr
        return jaxpr

    def backward(self, forward: core.Jaxpr) -> core.Jaxpr:
        residuals = [var.aval for var in forward.outvars[len(self.out) :]]
        cotangents = [self.out[k] for k in self.active]

        def pull(residuals: Leaves, cotangents: Leaves) -> Leaves:
            (gradients,) = jax.tree.unflatten(self._tree, residuals)(cotangents)
            return list(gradients)

        jaxpr: core.Jaxpr = jax.make_jaxpr(pull)(residuals, cotangents).jaxpr
        return jaxpr

    def _run(self, *leaves: Any) -> Leaves:
        def run(some: Leaves) -> tuple[Leaves, Leaves]:
            rest = iter(replaced(leaves, self.moving, some))
            consts = [[next(rest) for _ in layer.jaxpr.constvars] for layer in self._layers]
            x = list(rest)
            for layer, mine in zip(self._layers, consts, strict=True):
                x = layer.run(mine, x)
            return [x[k] for k in self.active], x

        _, pull, out = jax.vjp(run, [leaves[k] for k in self.moving], has_aux=True)
        residuals, self._tree = jax.tree.flatten(pull)
        return [*out, *residuals]


def measure_layers(layers: Sequence[Layer]) -> Chain:
    """The chain of these layers.

    A layer whose backward does not need its input (a tanh, a dropout, a reshape) is joined with the one before it: the
    value between them is never stored, and would be counted as if it were.
    """
    known = _KnownCosts(layers)
    starts = [0, *(k for k in range(1, len(layers)) if known.cost(k, k + 1).reads_input)]
    bounds = list(zip(starts, [*starts[1:], len(layers)], strict=True))
    names = [f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}" for start, stop in bounds]
    costs = [known.cost(start, stop) for start, stop in bounds]
    return replace(Chain.of((found.step() for found in costs), names), layers=tuple(bounds))


def tape_bytes(layers: Sequence[Layer]) -> list[int]:
    """The bytes of each layer's tape, including its input if the backward needs it."""
    known = _KnownCosts(layers)
    costs = [known.cost(k, k + 1, alone=True) for k in range(len(layers))]
    return [found.held + found.state * found.reads_input for found in costs]


class _KnownCosts:
    """The costs of ranges of layers, computed once for layers with the same equations, which are common."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._equations = [(str(layer.jaxpr), layer.given) for layer in layers]
        self._known: dict[Any, LayerCost] = {}

    def cost(self, start: int, stop: int, *, alone: bool = False) -> LayerCost:
        """The costs of layers [start, stop) at their place in the chain; with `alone`, in the middle of any chain."""
        first, last = (not alone and start == 0), (not alone and stop == len(self._layers))
        key = first, last, *self._equations[start:stop]
        if key not in self._known:
            self._known[key] = cost_of(self._layers[start:stop], first=first, last=last)
        return self._known[key]
