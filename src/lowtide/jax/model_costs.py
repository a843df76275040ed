"""A model's parts as a chain: what each form of a block holds, needs beside it, and computes again. From types alone.

Not estimated but known are arguments, results and gradients. The rest is what `stored.py` makes of the equations, and
XLA decides otherwise: so a plan is held against what was compiled, and `scaled` brings both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core

from lowtide.chain import Chain, StepCost, TapeOption, Working
from lowtide.jax.jaxprs import is_float, nbytes, needed_for
from lowtide.jax.layer_costs import Cost, cost
from lowtide.jax.model_forms import Form, forms
from lowtide.jax.model_parts import Model, Part, variables
from lowtide.jax.stored import Graph
from lowtide.planners.blocks import Blocks

OPTIMIZER = "(optimizer step)"
# Derivatives of these need no values.
_SUMS = frozenset(("add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type", "stop_gradient", "name"))
_MOVES = frozenset(("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"))
# How far an estimate of a tape can be off, and how often that range is halved.
_SCALES = (0.0, 4.0)
_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are there whatever is planned.

    Attributes:
        parameters: of the model.
        optimizer: of the optimizer's state.
        inputs: of all other arguments.
        gradients: of the parameters.
        results: at the end, beside arguments: gradients and values, or what an optimizer makes anew.
        optimizer_step: whether there is an optimizer.
    """

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    results: int
    optimizer_step: bool

    @property
    def arguments(self) -> int:
        """There from the beginning."""
        return self.parameters + self.optimizer + self.inputs


@dataclass(frozen=True, slots=True)
class Priced:
    """A form of a part: bytes that it holds, bytes with those at its worst moment, operations that are run again."""

    name: str
    held: int
    whole: int
    again: float


@dataclass(frozen=True, slots=True)
class PartCosts:
    """A part's forms, its operations, and bytes of gradients that are there when it is pulled back."""

    name: str
    menu: tuple[Priced, ...]
    forward: float
    backward: float
    gradients: int


def price(model: Model) -> list[PartCosts]:
    """What the parts cost on paper."""
    # What is there anyway: arguments, and for each part what an earlier one starts from too.
    there = set(model.others)
    # The gradient of a parameter is there from the last part that reads it on: the backward comes there first.
    reader = {var: k for k, part in enumerate(model.parts) for var in part.weights}
    known: dict[Any, tuple[Cost, tuple[Priced, ...]]] = {}
    rows = []
    for k, part in enumerate(model.parts):
        first, last = there.issuperset(part.given), k == len(model.parts) - 1
        shared = nbytes(var.aval for var in part.given if var in there)
        key = str(part.layer.jaxpr), shared, first, last, part.is_block
        if key not in known:
            found = cost([part.layer], first=first, last=last)
            known[key] = found, tuple(_priced(part, form, found, shared) for form in forms(part))
        found, menu = known[key]
        gradients = nbytes(var.aval for var, at in reader.items() if at >= k and is_float(var.aval))
        rows.append(PartCosts(part.name, menu, found.forward_work, found.backward_work, gradients))
        there.update(part.given)
    return rows


def _priced(part: Part, form: Form, found: Cost, shared: int) -> Priced:
    """A form, where `shared` bytes of what the part starts from are there anyway."""
    start, whole = found.state - shared, max(found.taping, found.backward) - shared
    if form.kept is None:
        held, again = found.held + start * found.reads_input, 0.0
    else:
        held, again = start + nbytes(var.aval for var in form.kept), _again(part, form)
    return Priced(form.name, held, max(whole, held), again)


def _again(part: Part, form: Form) -> float:
    """Operations that a rerun makes: what derivatives read, as far as it does not follow from what is kept."""
    jaxpr, kept = part.layer.jaxpr, {*(form.kept or ())}
    made = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not kept.issuperset(eqn.outvars)])
    read: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _SUMS | _MOVES:
            read.update(variables(eqn.invars))
        if any(core.jaxprs_in_params(eqn.params)):  # derivatives of loops and the like read what is inside of them
            read.update(eqn.outvars)
    eqns = needed_for(made, read - kept)
    inside = {var for eqn in eqns for var in eqn.outvars}
    given = list({var: None for eqn in eqns for var in variables(eqn.invars) if var not in inside})
    graph = Graph()
    graph.add(jaxpr.replace(constvars=[], invars=given, outvars=[], eqns=eqns), graph.values(var.aval for var in given))
    return graph.work(0, len(graph.ops))


def chain_of(rows: Sequence[PartCosts], fixed: Fixed, scale: float = 1.0, more: int = 0) -> Chain:
    """The parts as a chain, an optimizer's step before them; see `Blocks`.

    Args:
        rows: the parts.
        fixed: what is there whatever is planned.
        scale: what is estimated, a whole tape and what is needed beside it, is multiplied by this.
        more: bytes to add to each level.
    """
    steps, names = [], []
    end = fixed.arguments + fixed.results + more
    if fixed.optimizer_step:  # its backward comes last
        names.append(OPTIMIZER)
        steps.append(StepCost(1, 1, 0.0, 0.0, working=Working(backward=max(end - 1, 0))))
    for row in rows:
        always = fixed.arguments + row.gradients + more
        menu = []
        for form in row.menu:
            held = max(int(scale * form.held) if form is row.menu[0] else form.held, 1)
            menu.append((held, max(always + max(int(scale * form.whole) - held, 0), 0 if steps else end - held, 0)))
        options = [
            TapeOption(held, form.again, form.name, beside)
            for form, (held, beside) in zip(row.menu[1:], menu[1:], strict=True)
        ]
        working = Working(backward=menu[0][1])
        steps.append(StepCost(1, menu[0][0], row.forward, row.backward, working=working, options=tuple(options)))
        names.append(row.name)
    return replace(Chain.of(steps, names), parameters=fixed.parameters, gradients=fixed.gradients)


def calibrated(rows: Sequence[PartCosts], fixed: Fixed, *points: tuple[tuple[int, ...], int]) -> Chain:
    """The chain on which options take as many bytes as were found.

    Args:
        rows: the parts.
        fixed: what is there whatever is planned.
        points: options with the bytes of their program: those that keep everything, and perhaps others, which are then
            met exactly. Of one alone, what the estimate lacks is added to every level, because most of it is there
            whatever is chosen. With two, tapes are scaled until both lack the same. Where an estimate is too large,
            tapes are scaled until it is not.
    """

    def lacking(scale: float) -> list[int]:
        chain = chain_of(rows, fixed, scale)
        return [taken - Blocks(options).bill(chain).peak_memory for options, taken in points]

    def too_small(scale: float) -> bool:
        found = lacking(scale)
        return found[-1] > 0 and (len(points) == 1 or found[0] > found[-1])

    scale = 1.0
    if len(points) > 1 or lacking(scale)[0] < 0:
        scale, high = _SCALES
        for _ in range(_HALVINGS):
            middle = (scale + high) / 2
            scale, high = (middle, high) if too_small(middle) else (scale, middle)
    return chain_of(rows, fixed, scale, lacking(scale)[-1])
