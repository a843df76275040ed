"""The lines to paste so that a plan is used."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks
from lowtide.report.kinds import kind_of
from lowtide.sizes import format_size, parse_size

PLAN_FILE = "plan file"


class Snippet(NamedTuple):
    """Code, and what it is for."""

    name: str
    code: str


_READING = (
    'from pathlib import Path\n\nfrom lowtide import Plan\n\nplan = Plan.from_json(Path("plan.json").read_text())\n'
)


def snippets(plan: Plan) -> tuple[Snippet, ...]:
    """One for each front end that the plan can be for, the likely one first, and one that reads it from a file."""
    model = kind_of(plan).model
    if model is not None:
        is_torch = model.unit == "s"
        used = "torch as lt\n\nlt.apply(plan, model)" if is_torch else "jax as lt\n\nloss = lt.apply(plan, loss)"
        in_file = Snippet(PLAN_FILE, f"{_READING}\nimport lowtide.{used}")
        return *for_model(model, _knob(plan.knob)), in_file
    if not plan.chain.is_equal:
        return _for_layers(plan.knob)
    knob = _knob(plan.knob)
    torch = Snippet("PyTorch", _loops("torch", "ys = torch.stack([step(x) for x in xs])", knob))
    jax = Snippet("JAX", _loops("jax", "ys = jax.lax.map(step, xs)", knob))
    brainstate = Snippet(
        "brainstate",
        "import lowtide.brainstate as lt\n\n"
        "# was: ys = brainstate.transform.for_loop(net.update, xs)\n"
        f"ys = lt.checkpointed_for_loop(net.update, xs{knob})",
    )
    file = Snippet(PLAN_FILE, f"{_READING}\n{_loops('torch', '', ', plan=plan')}")
    return (jax, brainstate, torch, file) if plan.rooms else (torch, jax, brainstate, file)


def for_model(schedule: Blocks, knob: str) -> tuple[Snippet, Snippet]:
    """The same for a whole model, with the peak as one more argument; where its times were counted, JAX traced it."""
    trained = ", optimizer=optimizer" if schedule.optimizer else ""
    torch = Snippet(
        "PyTorch",
        "import lowtide.torch as lt\n\n"
        "# once, before training; inputs are what the model is called with\n"
        f"plan = lt.auto_checkpoint(model, *inputs{knob}{trained})",
    )
    jax = Snippet(
        "JAX",
        "import lowtide.jax as lt\n\n"
        "# inputs are what the loss is called with besides its parameters\n"
        f"plan = lt.plan_model(loss, params, *inputs{knob}{trained})\n"
        "loss = lt.apply(plan, loss)",
    )
    return (torch, jax) if schedule.unit == "s" else (jax, torch)


def _loops(front_end: str, was: str, knob: str) -> str:
    """A plan does not say which of the two loops it is for: a step has a carry or it has none."""
    scan = "" if front_end == "torch" else "# was: carry, ys = jax.lax.scan(step, init, xs)\n"
    return (
        f"import lowtide.{front_end} as lt\n\n"
        "# y = step(x)\n"
        f"{f'# was: {was}' + chr(10) if was else ''}"
        f"ys = lt.checkpointed_for_loop(step, xs{knob})\n\n"
        "# carry, y = step(carry, x)\n"
        f"{scan}carry, ys = lt.checkpointed_scan(step, init, xs{knob})"
    )


def _for_layers(knob: Knob) -> tuple[Snippet, ...]:
    """Layers have one knob, the budget; plans for any other are handed over as they are."""
    in_file = f"{_READING}\nimport lowtide.torch as lt\n\ny = lt.sequential(layers, x, plan=plan)"
    if knob.name not in ("budget", "none"):
        return (Snippet("PyTorch", in_file), Snippet("JAX", in_file.replace("lowtide.torch", "lowtide.jax")))
    call = f"y = lt.sequential(layers, x{_knob(knob)})"
    return (
        Snippet("PyTorch", f"import lowtide.torch as lt\n\n# was: y = layers(x)\n{call}"),
        Snippet("JAX", f"import lowtide.jax as lt\n\n# was: y = x; for layer in layers: y = layer(y)\n{call}"),
        Snippet(PLAN_FILE, in_file),
    )


def _knob(knob: Knob) -> str:
    """The knob as one more argument."""
    if knob.value is None:
        return ""
    written = format_size(knob.value).replace(" ", "")
    is_size = knob.name in ("budget", "peak") and "," not in written and parse_size(written) == knob.value
    return f', {knob.name}="{written}"' if is_size else f", {knob.name}={knob.value}"
