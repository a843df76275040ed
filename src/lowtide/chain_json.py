"""A chain as JSON, and back, also from the JSON of earlier versions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from lowtide import forms
from lowtide.chain import Chain, Role, StepCost, TapeOption, Ways, Working


def chain_document(chain: Chain) -> dict[str, Any]:
    """The chain in the form that is written to JSON."""
    return {
        "length": chain.length,
        "steps": [_step_document(step) for step in chain.steps],
        "names": chain.names,
        "parameters": chain.parameters,
        "gradients": chain.gradients,
        "ways": None if chain.ways is None else _ways_document(chain.ways),
        "roles": chain.roles,
        "layers": chain.layers,
    }


def chain_of(costs: dict[str, Any]) -> Chain:
    """The chain that `chain_document` wrote. In earlier versions the roles of steps follow from their names alone."""
    steps, names = tuple(map(_step, costs["steps"])), tuple(costs["names"])
    roles, layers = costs.get("roles"), costs.get("layers")
    return Chain(
        steps,
        costs["length"],
        names,
        costs.get("parameters", 0),
        costs.get("gradients", 0),
        _ways(costs.get("ways")),
        _roles_named(names) if roles is None else tuple(map(Role, roles)),
        _layers_named(names) if layers is None else tuple((start, stop) for start, stop in layers),
    )


def _roles_named(names: tuple[str, ...]) -> tuple[Role, ...]:
    """The roles of steps whose names an earlier version wrote: every name but a block's is in parentheses."""
    if not any(name.startswith("(") for name in names):
        return ()
    told = {"(optimizer step)": Role.OPTIMIZER, "(loss)": Role.LOSS}
    return tuple(told.get(name, Role.BETWEEN) if name.startswith("(") else Role.BLOCK for name in names)


_LAYERS = re.compile(r"([0-9]+)(?:-([0-9]+))? ")


def _layers_named(names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """The ranges of layers of steps whose names an earlier version wrote: "3 Linear", "4-5 Conv2d, ReLU"."""
    found = [_LAYERS.match(name) for name in names]
    return tuple((int(match[1]), int(match[2] or match[1]) + 1) for match in found if match) if all(found) else ()


def _step_document(step: StepCost) -> dict[str, Any]:
    written = dataclasses.asdict(dataclasses.replace(step, options=()))
    return written | {"options": [_option_document(option) for option in step.options]}


def _option_document(option: TapeOption) -> dict[str, Any]:
    written = dataclasses.asdict(dataclasses.replace(option, form=None))
    return written | {"form": None if option.form is None else forms.document(option.form)}


def _step(step: dict[str, Any]) -> StepCost:
    nested = {"working": Working(**step["working"]), "options": tuple(map(_option, step["options"]))}
    return StepCost(**(step | nested))


def _option(option: dict[str, Any]) -> TapeOption:
    """The option that `_step_document` wrote. In earlier versions its form follows from its name alone."""
    if "form" not in option:
        return TapeOption(**option, form=forms.form_named(option["name"]))
    form = option["form"]
    return TapeOption(**(option | {"form": None if form is None else forms.form_of(form)}))


def _ways_document(ways: Ways) -> dict[str, Any]:
    return {"several": _step_document(ways.several), "single": _step_document(ways.single), "floor": ways.floor}


def _ways(ways: dict[str, Any] | None) -> Ways | None:
    return None if ways is None else Ways(_step(ways["several"]), _step(ways["single"]), ways["floor"])
