"""What layers cost, from their types alone: bytes as XLA would lay them out, and floating point operations.

Not counted is what the plain call holds too: parameters, their gradients, and what is made of parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from lowtide.chain import Chain, StepCost, Working
from lowtide.jax.jaxprs import is_float, nbytes
from lowtide.jax.layers import Layer
from lowtide.jax.step import Leaves
from lowtide.jax.stored import Graph, Liveness
from lowtide.jax.taping import replaced


@dataclass(frozen=True, slots=True)
class Cost:
    """What a stretch of layers costs.

    Attributes:
        state: bytes of what it starts from.
        held: bytes of its tape beside what it starts from, and beside its results, which the next stretch starts from.
        reads_input: whether the way back needs what it starts from.
        advance: most bytes while it runs.
        taping: most bytes while it runs and keeps its tape.
        backward: most bytes while it is pulled back.
        forward_work: floating point operations of running it.
        backward_work: floating point operations of pulling it back.
        cotangent: bytes of the gradient of what it starts from.
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
        """The stretch as a step of a chain."""
        state = max(self.state, 1)
        tape = state + self.held
        working = Working(self.advance, max(self.taping - tape, 0), max(self.backward - tape, 0))
        return StepCost(state, tape, self.forward_work, self.backward_work, cotangent=self.cotangent, working=working)


def cost(layers: Sequence[Layer], *, first: bool = False, last: bool = False) -> Cost:
    """What a stretch of layers costs, where gradients are taken of all floats that it closes over or starts from.

    Args:
        layers: one or more.
        first: the stretch begins the chain, so the gradient of what it starts from, if any, is a result of the program.
        last: it ends the chain. Where it does not, nobody asks for its results when it is run again to be taped, and
            XLA makes only those that the way back reads.
    """
    vjp = _Vjp(layers)
    forward = vjp.forward()
    backward = vjp.backward(forward)
    graph = Graph()
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
    return Cost(
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
    """A stretch with its residuals among its results, and the way back from them, as jaxprs."""

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


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` layers as a chain. Step k is the layers from `starts[k]` up to the next start."""

    chain: Chain
    starts: tuple[int, ...]
    count: int


def steps(layers: Sequence[Layer]) -> Steps:
    """The chain of these layers.

    A layer that is pulled back without what it starts from (a tanh, a dropout, a change of shape) is joined with the
    one before it: what is between them is never stored, and would be counted as if it were.
    """
    known: dict[Any, Cost] = {}

    def priced(start: int, stop: int) -> Cost:
        # Layers of one kind are common, and the same equations cost the same.
        part = layers[start:stop]
        first, last = start == 0, stop == len(layers)
        key = (first, last, *((str(layer.jaxpr), layer.given) for layer in part))
        if key not in known:
            known[key] = cost(part, first=first, last=last)
        return known[key]

    starts = [0, *(k for k in range(1, len(layers)) if priced(k, k + 1).reads_input)]
    edges = list(zip(starts, [*starts[1:], len(layers)], strict=True))
    names = [f"layer {start}" if stop - start == 1 else f"layers {start} to {stop - 1}" for start, stop in edges]
    costs = [priced(*edge) for edge in edges]
    return Steps(Chain.of((found.step() for found in costs), names), tuple(starts), len(layers))
