"""The lines to paste so that a plan is used."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.plan import Knob, Plan
from lowtide.sizes import format_size, parse_size


class Snippet(NamedTuple):
    """Code, and what it is for."""

    name: str
    code: str


_READING = (
    'from pathlib import Path\n\nfrom lowtide import Plan\n\nplan = Plan.from_json(Path("plan.json").read_text())\n'
)


def snippets(plan: Plan) -> tuple[Snippet, ...]:
    """One for each front end that the plan can be for, and one that reads the plan from a file."""
    if not plan.chain.is_equal:
        return _for_layers(plan.knob)
    knob = _knob(plan.knob)
    given = f", {knob}" if knob else ""
    return (
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
        Snippet(
            "plan file",
            f"{_READING}\nimport lowtide.torch as lt\n\nys = lt.checkpointed_for_loop(step, xs, plan=plan)",
        ),
    )


def _for_layers(knob: Knob) -> tuple[Snippet, ...]:
    """Layers have one knob, the budget; plans for any other are handed over as they are."""
    in_file = f"{_READING}\nimport lowtide.torch as lt\n\ny = lt.sequential(layers, x, plan=plan)"
    if knob.name not in ("budget", "none"):
        return (Snippet("PyTorch", in_file), Snippet("JAX", in_file.replace("lowtide.torch", "lowtide.jax")))
    given = f", {_knob(knob)}" if knob.name == "budget" else ""
    call = f"y = lt.sequential(layers, x{given})"
    return (
        Snippet("PyTorch", f"import lowtide.torch as lt\n\n# was: y = layers(x)\n{call}"),
        Snippet("JAX", f"import lowtide.jax as lt\n\n# was: y = x; for layer in layers: y = layer(y)\n{call}"),
        Snippet("plan file", in_file),
    )


def _knob(knob: Knob) -> str:
    if knob.value is None:
        return ""
    if knob.name != "budget":
        return f"{knob.name}={knob.value}"
    written = format_size(knob.value).replace(" ", "")
    exact = "," not in written and parse_size(written) == knob.value
    return f'budget="{written}"' if exact else f"budget={knob.value}"
