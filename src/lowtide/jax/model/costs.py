"""A model's parts as a chain: what each form of a block holds, needs beside it, and computes again. From types alone.

Not estimated but known are arguments, results and gradients. The rest is what `xla/memory.py` makes of the equations,
and XLA decides otherwise: so a plan is held against what was compiled, and `calibrated` brings both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core

from lowtide.chain import Chain, Role, StepCost, TapeOption, Working
from lowtide.forms import Form
from lowtide.jax.layers.costs import LayerCost, cost_of
from lowtide.jax.model.forms import BlockForm, forms
from lowtide.jax.model.parts import Model, ModelPart
from lowtide.jax.xla.jaxprs import is_float, nbytes, needed_for, variables
from lowtide.jax.xla.memory import XlaGraph
from lowtide.planners.blocks import Blocks

OPTIMIZER = "(optimizer step)"
# Derivatives of these need no values.
_SUMS = frozenset(("add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type", "stop_gradient", "name"))
_MOVES = frozenset(("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"))
_TAPE_SCALES = (0.0, 4.0)  # how far an estimate of a tape can be off
_HALVINGS = 24  # of that range


@dataclass(frozen=True, slots=True)
class ResidentBytes:
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
class PartFormCost:
    """A form of a part: bytes that it holds, bytes with those at its worst moment, operations that are run again."""

    form: Form
    held: int
    whole: int
    again: float


@dataclass(frozen=True, slots=True)
class PartCost:
    """A part's forms, its operations, and bytes of gradients that are there when it is pulled back."""

    name: str
    role: Role
    menu: tuple[PartFormCost, ...]
    forward: float
    backward: float
    gradients: int


def measure_model(model: Model) -> list[PartCost]:
    """What the parts cost on paper."""
    # What is there anyway: arguments, and for each part what an earlier one starts from too.
    there = set(model.others)
    # The gradient of a parameter is there from the last part that reads it on: the backward comes there first.
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
    """A form, where `shared` bytes of what the part starts from are there anyway."""
    start, whole = found.state - shared, max(found.taping, found.backward) - shared
    if form.kept is None:
        held, again = found.held + start * found.reads_input, 0.0
    else:
        held, again = start + nbytes(var.aval for var in form.kept), _again(part, form)
    return PartFormCost(form.form, held, max(whole, held), again)


def _again(part: ModelPart, form: BlockForm) -> float:
    """Operations that a rerun makes: what derivatives read, as far as it does not follow from what is kept."""
    jaxpr, kept = part.layer.jaxpr, {*(form.kept or ())}
    made = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not kept.issuperset(eqn.outvars)])
    eqns = needed_for(made, _read_by_derivatives(jaxpr) - kept)
    inside = {var for eqn in eqns for var in eqn.outvars}
    given = list({var: None for eqn in eqns for var in variables(eqn.invars) if var not in inside})
    graph = XlaGraph()
    graph.add(jaxpr.replace(constvars=[], invars=given, outvars=[], eqns=eqns), graph.values(var.aval for var in given))
    return graph.work(0, len(graph.ops))


def _read_by_derivatives(jaxpr: core.Jaxpr) -> set[Any]:
    """The values that the derivatives of equations read."""
    read: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _SUMS | _MOVES:
            read.update(variables(eqn.invars))
        if any(core.jaxprs_in_params(eqn.params)):  # derivatives of loops and the like read what is inside of them
            read.update(eqn.outvars)
    return read


def chain_of(rows: Sequence[PartCost], resident: ResidentBytes, scale: float = 1.0, more: int = 0) -> Chain:
    """The parts as a chain, an optimizer's step before them; see `Blocks`.

    Args:
        rows: the parts.
        resident: what is there whatever is planned.
        scale: what is estimated, a whole tape and what is needed beside it, is multiplied by this.
        more: bytes to add to each level.
    """
    steps, names, roles = [], [], []
    end = resident.arguments + resident.results + more
    if resident.optimizer_step:  # its backward comes last
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
    """The chain on which options take as many bytes as were found.

    Args:
        rows: the parts.
        resident: what is there whatever is planned.
        points: options with the bytes of their program: those that keep everything, and perhaps others, which are then
            met exactly. Of one alone, what the estimate lacks is added to every level, because most of it is there
            whatever is chosen. With two, tapes are scaled until both lack the same. Where an estimate is too large,
            tapes are scaled until it is not.
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
        for _ in range(_HALVINGS):
            middle = (scale + high) / 2
            scale, high = (middle, high) if too_small(middle) else (scale, middle)
    return chain_of(rows, resident, scale, lacking(scale)[-1])
