"""A model's parts as a chain: what each form of a block holds, needs beside that, and recomputes. From types alone.

The bytes of arguments, results and gradients are known. The rest is estimated from the equations (`xla/memory.py`), and
XLA may decide otherwise: so a plan is compared with its compiled program, and `calibrated` makes the estimate agree
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core

from lowtide.chain import Chain, Role, StepCost, TapeOption, Working
from lowtide.forms import Form
from lowtide.jax.installed import jaxprs_in_params
from lowtide.jax.layers.costs import LayerCost, cost_of
from lowtide.jax.model.forms import BlockForm, forms
from lowtide.jax.model.parts import Model, ModelPart
from lowtide.jax.xla.jaxprs import is_float, nbytes, needed_for, variables
from lowtide.jax.xla.memory import XlaGraph
from lowtide.planners.blocks import Blocks

OPTIMIZER = "(optimizer step)"
# Primitives whose derivatives need no values.
_SUMS = frozenset(("add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type", "stop_gradient", "name"))
_MOVES = frozenset(("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"))
_TAPE_SCALES = (0.0, 4.0)  # the range of factors between an estimated and a compiled tape
_BISECTIONS = 24  # of that range


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """The bytes that are held with any plan.

    Attributes:
        parameters: bytes of the model's parameters.
        optimizer: bytes of the optimizer's state.
        inputs: bytes of all other arguments.
        gradients: bytes of the parameters' gradients.
        results: bytes held at the end beside the arguments: values, and gradients or what an optimizer's step returns
            without reusing its arguments.
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
        """Bytes that are held from the beginning."""
        return self.parameters + self.optimizer + self.inputs


@dataclass(frozen=True, slots=True)
class PartFormCost:
    """The costs of a part in one form.

    Attributes:
        form: the form.
        held: bytes that it holds between forward and backward.
        whole: bytes at its worst moment, those included.
        again: floating point operations of its rerun.
    """

    form: Form
    held: int
    whole: int
    again: float


@dataclass(frozen=True, slots=True)
class PartCost:
    """The costs of a part: its forms, its floating point operations, and bytes of gradients held in its backward."""

    name: str
    role: Role
    menu: tuple[PartFormCost, ...]
    forward: float
    backward: float
    gradients: int


def measure_model(model: Model) -> list[PartCost]:
    """The estimated costs of the parts."""
    # Values that a part need not hold: arguments, and inputs that an earlier part has too.
    there = set(model.others)
    # The gradient of a parameter exists from the last part that reads it on, which the backward reaches first.
    reader = {var: k for k, part in enumerate(model.parts) for var in part.weights}
    known: dict[Any, tuple[LayerCost, tuple[PartFormCost, ...]]] = {}
    rows = []
    for k, part in enumerate(model.parts):
        first, last = there.issuperset(part.given), k == len(model.parts) - 1
        shared = nbytes(var.aval for var in part.given if var in there)
        key = str(part.layer.jaxpr), shared, first, last, part.is_block
        if key not in known:
            found = cost_of([part.layer], first=first, last=last)
            known[key] = found, tuple(_form_cost(part, form, found, shared) for form in forms(part))
        found, menu = known[key]
        gradients = nbytes(var.aval for var, at in reader.items() if at >= k and is_float(var.aval))
        rows.append(PartCost(part.name, part.role, menu, found.forward_work, found.backward_work, gradients))
        there.update(part.given)
    return rows


def _form_cost(part: ModelPart, form: BlockForm, found: LayerCost, shared: int) -> PartFormCost:
    """The costs of a form, if `shared` bytes of the part's input are held anyway."""
    start, whole = found.state - shared, max(found.taping, found.backward) - shared
    if form.kept is None:
        held, again = found.held + start * found.reads_input, 0.0
    else:
        held, again = start + nbytes(var.aval for var in form.kept), _again(part, form)
    return PartFormCost(form.form, held, max(whole, held), again)


def _again(part: ModelPart, form: BlockForm) -> float:
    """The floating point operations of a rerun, which computes what derivatives read and is not kept."""
    jaxpr, kept = part.layer.jaxpr, {*(form.kept or ())}
    made = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not kept.issuperset(eqn.outvars)])
    eqns = needed_for(made, _read_by_derivatives(jaxpr) - kept)
    inside = {var for eqn in eqns for var in eqn.outvars}
    given = list({var: None for eqn in eqns for var in variables(eqn.invars) if var not in inside})
    graph = XlaGraph()
    graph.add(jaxpr.replace(constvars=[], invars=given, outvars=[], eqns=eqns), graph.values(var.aval for var in given))
    return graph.work(0, len(graph.ops))


def _read_by_derivatives(jaxpr: core.Jaxpr) -> set[Any]:
    """The variables that the derivatives of equations read."""
    read: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _SUMS | _MOVES:
            read.update(variables(eqn.invars))
        if any(jaxprs_in_params(eqn.params)):  # derivatives of loops and calls read values computed inside them
            read.update(eqn.outvars)
    return read


def chain_of(rows: Sequence[PartCost], resident: ResidentBytes, scale: float = 1.0, more: int = 0) -> Chain:
    """The parts as a chain, after an optimizer's step if there is one; see `Blocks`.

    Args:
        rows: the costs of the parts.
        resident: the bytes that are held with any plan.
        scale: the factor for the estimated bytes: a whole tape, and what is needed beside tapes.
        more: bytes to add to each level.
    """
    steps, names, roles = [], [], []
    end = resident.arguments + resident.results + more
    if resident.optimizer_step:  # the first step of the chain, whose backward comes last
        names.append(OPTIMIZER)
        roles.append(Role.OPTIMIZER)
        steps.append(StepCost(1, 1, 0.0, 0.0, working=Working(backward=max(end - 1, 0))))
    for row in rows:
        always = resident.arguments + row.gradients + more
        menu = []
        for form in row.menu:
            held = max(int(scale * form.held) if form is row.menu[0] else form.held, 1)
            menu.append((held, max(always + max(int(scale * form.whole) - held, 0), 0 if steps else end - held, 0)))
        options = [
            TapeOption(held, form.again, backward=beside, form=form.form)
            for form, (held, beside) in zip(row.menu[1:], menu[1:], strict=True)
        ]
        working = Working(backward=menu[0][1])
        steps.append(StepCost(1, menu[0][0], row.forward, row.backward, working=working, options=tuple(options)))
        names.append(row.name)
        roles.append(row.role)
    return replace(Chain.of(steps, names, roles), parameters=resident.parameters, gradients=resident.gradients)


def calibrated(rows: Sequence[PartCost], resident: ResidentBytes, *points: tuple[tuple[int, ...], int]) -> Chain:
    """The chain on which the bill of options has the bytes of their compiled program.

    Args:
        rows: the costs of the parts.
        resident: the bytes that are held with any plan.
        points: options with the bytes of their program: first those that keep everything, and perhaps others, which are
            then met exactly. With one point, what the estimate lacks is added to every level, because most of it is
            held with any choice. With two, tapes are scaled until both lack the same. An estimate that is too large is
            scaled until it is not.
    """

    def lacking(scale: float) -> list[int]:
        chain = chain_of(rows, resident, scale)
        return [taken - Blocks(options).bill(chain).peak_memory for options, taken in points]

    def too_small(scale: float) -> bool:
        found = lacking(scale)
        return found[-1] > 0 and (len(points) == 1 or found[0] > found[-1])

    scale = 1.0
    if len(points) > 1 or lacking(scale)[0] < 0:
        scale, high = _TAPE_SCALES
        for _ in range(_BISECTIONS):
            middle = (scale + high) / 2
            scale, high = (middle, high) if too_small(middle) else (scale, middle)
    return chain_of(rows, resident, scale, lacking(scale)[-1])
