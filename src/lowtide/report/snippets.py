"""The lines to paste so that a plan is used."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.plan import Knob, Plan
from lowtide.sizes import format_size, parse_size


class Snippet(NamedTuple):
    """Code, and what it is for."""

    name: str
    code: str


def snippets(plan: Plan) -> tuple[Snippet, ...]:
    """One for each front end that the plan can be for, and one that reads the plan from a file."""
    knob = _knob(plan.knob)
    if plan.chain.is_equal:
        given = f", {knob}" if knob else ""
        found = [
            Snippet(
                "PyTorch",
                "import lowtide.torch as lt\n\n"
                "# was: ys = torch.stack([step(x) for x in xs])\n"
                f"ys = lt.checkpointed_for_loop(step, xs{given})",
            ),
            Snippet(
                "JAX",
                "import lowtide.jax as lt\n\n"
                "# was: carry, ys = jax.lax.scan(step, init, xs)\n"
                f"carry, ys = lt.checkpointed_scan(step, init, xs{given})",
            ),
            Snippet(
                "brainstate",
                "import lowtide.brainstate as lt\n\n"
                "# was: ys = brainstate.transform.for_loop(net.update, xs)\n"
                f"ys = lt.checkpointed_for_loop(net.update, xs{given})",
            ),
        ]
        using = "ys = lt.checkpointed_for_loop(step, xs, plan=plan)"
    else:
        given = f", {knob}" if plan.knob.name == "budget" else "" if plan.knob.name == "none" else ", plan=plan"
        found = [
            Snippet(
                "PyTorch", f"import lowtide.torch as lt\n\n# was: y = layers(x)\ny = lt.sequential(layers, x{given})"
            ),
            Snippet(
                "JAX",
                "import lowtide.jax as lt\n\n"
                "# was: for layer in layers: x = layer(x)\n"
                f"y = lt.sequential(layers, x{given})",
            ),
        ]
        using = "y = lt.sequential(layers, x, plan=plan)"
    reading = (
        'from pathlib import Path\n\nfrom lowtide import Plan\n\nplan = Plan.from_json(Path("plan.json").read_text())'
    )
    return (*found, Snippet("plan file", f"{reading}\n{using}"))


def _knob(knob: Knob) -> str:
    if knob.value is None:
        return ""
    if knob.name != "budget":
        return f"{knob.name}={knob.value}"
    written = format_size(knob.value).replace(" ", "")
    exact = "," not in written and parse_size(written) == knob.value
    return f'budget="{written}"' if exact else f"budget={knob.value}"
