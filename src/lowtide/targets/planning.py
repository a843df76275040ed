"""Plans what a target names: a loop, layers, a step, a chain, or what has been planned already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.chain import Chain, Disk
from lowtide.errors import InputError
from lowtide.interface.options import Knobs
from lowtide.plan import Plan
from lowtide.planners.choose import choose
from lowtide.targets.find import find, importable, showing
from lowtide.targets.frameworks import FrontEnd, front_end
from lowtide.targets.inputs import InputForm, jax_types, torch_tensors

ACCEPTED = """  a function without parameters that returns
    (step, init, xs)  to plan a loop, carry, y = step(carry, x)
    (step, init)      the same without inputs, with --steps
    (layers, x)       to plan layers that are called one after the other
    a lowtide.Plan or a lowtide.Chain
  a step y = f(x), a module for example, with --input 'float32[64,80]' and --steps 1000
  layers, an nn.Sequential for example, with --input 'float32[64,80]'"""


def plan_target(
    target: str,
    *,
    budget: str | None = None,
    checkpoints: int | None = None,
    base: int | None = None,
    disk: Disk | None = None,
    inputs: Sequence[str] = (),
    steps: int | None = None,
    framework: str | None = None,
) -> Plan:
    """The plan of what `target` names.

    Args:
        target: `module:name` or `path/to/file.py:name`; the current folder is searched first.
        budget: bytes for snapshots, tape and working set: "64MiB", or "25%" of all tapes.
        checkpoints: the most snapshots at once, beside one step of tape.
        base: the number of steps from one snapshot to the next.
        disk: a second tier for a chain's snapshots.
        inputs: the inputs of a step or of the first layer, each as "float32[64,80]".
        steps: the number of steps of a loop, if its inputs do not determine it.
        framework: "torch" or "jax"; recognised by the values if left out.

    Raises:
        InputError: the target is nothing that can be planned; the message says what was found and what is accepted.
        BudgetError: no plan fits the budget.
    """
    forms = [InputForm.read(text) for text in inputs]
    Knobs(base, checkpoints, budget, None)  # refuses two options at once, before anything is imported
    given = {"budget": budget, "checkpoints": checkpoints, "base": base}
    knob = {name: value for name, value in given.items() if value is not None}
    with importable(target):
        found = find(target)
        with showing(f"planning {target}"):
            if _makes(found, target, len(forms)):
                with showing(target):
                    found = found()
            return _Request(target, knob, disk, forms, steps, framework).plan(found)


@dataclass(frozen=True, slots=True)
class _Request:
    target: str
    knob: dict[str, Any]
    disk: Disk | None
    forms: list[InputForm]
    steps: int | None
    framework: str | None

    def plan(self, value: Any) -> Plan:
        """The plan of a value that was found, or that a function returned."""
        if isinstance(value, Plan | Chain):
            return self._on_paper(value)
        if self.disk is not None:
            raise InputError(
                "snapshots of a function's own run stay in memory; leave out --disk-write and --disk-read, or let "
                f"{self.target} return a lowtide.Chain, which is planned on paper"
            )
        if self.forms:
            return self._from_forms(value)
        if isinstance(value, tuple) and len(value) in (2, 3):
            return self._from_tuple(value)
        if self.steps is not None and callable(value):  # a step without inputs
            _, lt = self._front_end(value)
            return lt.plan_for_loop(value, length=self.steps, **self.knob)
        raise self._refusal(value)

    def _on_paper(self, value: Plan | Chain) -> Plan:
        if self.forms or self.steps is not None:
            raise InputError(f"{self.target} is a {type(value).__name__} already; leave out --input and --steps")
        if isinstance(value, Chain):
            return choose(value, disk=self.disk, **self.knob)
        if self.knob or self.disk is not None:
            raise InputError(f"{self.target} is a plan already; leave out the knobs, or return its chain: plan.chain")
        return value

    def _from_forms(self, value: Any) -> Plan:
        if self.steps is not None:
            if not callable(value):
                raise InputError(
                    f"{self.target} is {_named(value)}, which is no step: a step can be called. "
                    "Leave out --steps to plan layers"
                )
            name, lt = self._front_end(value)
            if name == "torch":  # one tensor for all steps, so that a million steps allocate no more
                xs = [lt.Steps(functools.partial(_same, x), self.steps) for x in torch_tensors(self.forms)]
            else:
                xs = jax_types(self.forms, self.steps)
            return lt.plan_for_loop(value, *xs, length=self.steps, **self.knob)
        if not isinstance(value, Iterable):
            raise InputError(
                f"{self.target} is {_named(value)}, which is no row of layers; give --steps to plan it as the step of "
                f"a loop, or name a row of layers instead{_rows_of_layers(value)}"
            )
        name, lt = self._front_end(value)
        made = torch_tensors(self.forms) if name == "torch" else jax_types(self.forms, None)
        return self._layers(lt, value, made[0] if len(made) == 1 else tuple(made))

    def _from_tuple(self, value: tuple[Any, ...]) -> Plan:
        first, *rest = value
        are_layers = len(rest) == 1 and self.steps is None and isinstance(first, Iterable)
        if not are_layers and not callable(first):
            raise self._refusal(value)
        _, lt = self._front_end(value)
        if are_layers:
            return self._layers(lt, first, rest[0])
        return lt.plan_scan(first, *rest, length=self.steps, **self.knob)

    def _front_end(self, values: Any) -> tuple[str, FrontEnd]:
        return front_end(values, self.framework, self.target)

    def _layers(self, lt: FrontEnd, layers: Any, x: Any) -> Plan:
        others = [f"--{name}" for name in self.knob if name != "budget"]
        if others:
            raise InputError(f"layers are planned for a budget; give --budget instead of {others[0]}")
        return lt.plan_sequential(layers, x, **self.knob)

    def _refusal(self, value: Any) -> InputError:
        return InputError(f"{self.target} returned {_named(value)}, which cannot be planned. What can:\n{ACCEPTED}")


def _same(item: Any, _: int) -> Any:
    """The input of any step: the same item for all of them."""
    return item


def _makes(found: Any, target: str, inputs: int) -> bool:
    """Whether `found` is to be called without arguments, and its result planned, rather than to be planned itself."""
    if not (inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, functools.partial)):
        return False
    if inputs and not inspect.isclass(found) and _takes(found, inputs):
        return False
    if _takes(found, 0):
        return True
    fit = f", which {inputs} --input {'does' if inputs == 1 else 'do'} not fit" if inputs else ""
    raise InputError(
        f"{target} needs arguments: {_signature(found) or 'it does not say which'}{fit}. Give one --input for each "
        "argument of a step, and --steps; for a step with a carry, name a function without parameters that returns "
        f"(step, init, xs). What can be planned:\n{ACCEPTED}"
    )


def _takes(function: Callable[..., Any], count: int) -> bool:
    signature = _signature(function)
    if signature is None:
        return count > 0
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None for a builtin that has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _named(value: Any) -> str:
    """A value in a few words: its type, and the types of its parts if it is a tuple."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _rows_of_layers(value: Any) -> str:
    """The names of a module's rows of layers, as the end of an error message."""
    children = dict(value.named_children()) if hasattr(value, "named_children") else {}
    rows = [f".{name}" for name, child in children.items() if isinstance(child, Iterable)]
    return f", such as its {' or '.join(rows)}" if rows else ""
