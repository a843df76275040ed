"""The code to paste to use a plan. A plan does not know its front end, so there is a snippet for each."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.plan import Knob
from lowtide.sizes import format_size, parse_size

PLAN_FILE = "plan file"


class Snippet(NamedTuple):
    """Code, and what it is for."""

    name: str
    code: str


_READING = (
    'from pathlib import Path\n\nfrom lowtide import Plan\n\nplan = Plan.from_json(Path("plan.json").read_text())\n'
)


def loop_snippets(knob: Knob, *, jax_first: bool) -> tuple[Snippet, ...]:
    """Snippets for a loop: one for each front end, the likely one first, and one that reads the plan from a file."""
    option = as_argument(knob)
    torch = Snippet("PyTorch", _loops("torch", "ys = torch.stack([step(x) for x in xs])", option))
    jax = Snippet("JAX", _loops("jax", "ys = jax.lax.map(step, xs)", option))
    brainstate = Snippet(
        "brainstate",
        "import lowtide.brainstate as lt\n\n"
        "# was: ys = brainstate.transform.for_loop(net.update, xs)\n"
        f"ys = lt.checkpointed_for_loop(net.update, xs{option})",
    )
    file = Snippet(PLAN_FILE, f"{_READING}\n{_loops('torch', '', ', plan=plan')}")
    return (jax, brainstate, torch, file) if jax_first else (torch, jax, brainstate, file)


def _loops(front_end: str, was: str, option: str) -> str:
    """The code of both loops, with and without a carry, because a plan does not record which of them it is for."""
    scan = "" if front_end == "torch" else "# was: carry, ys = jax.lax.scan(step, init, xs)\n"
    return (
        f"import lowtide.{front_end} as lt\n\n"
        "# y = step(x)\n"
        f"{f'# was: {was}' + chr(10) if was else ''}"
        f"ys = lt.checkpointed_for_loop(step, xs{option})\n\n"
        "# carry, y = step(carry, x)\n"
        f"{scan}carry, ys = lt.checkpointed_scan(step, init, xs{option})"
    )


def layer_snippets(knob: Knob) -> tuple[Snippet, ...]:
    """Snippets for a row of layers. Its only option is the budget; a plan for any other is read from a file."""
    in_file = f"{_READING}\nimport lowtide.torch as lt\n\ny = lt.sequential(layers, x, plan=plan)"
    if knob.value is not None and not knob.in_bytes:
        return (Snippet("PyTorch", in_file), Snippet("JAX", in_file.replace("lowtide.torch", "lowtide.jax")))
    call = f"y = lt.sequential(layers, x{as_argument(knob)})"
    return (
        Snippet("PyTorch", f"import lowtide.torch as lt\n\n# was: y = layers(x)\n{call}"),
        Snippet("JAX", f"import lowtide.jax as lt\n\n# was: y = x; for layer in layers: y = layer(y)\n{call}"),
        Snippet(PLAN_FILE, in_file),
    )


def model_snippets(peak: str, *, has_optimizer: bool, jax_first: bool) -> tuple[Snippet, Snippet]:
    """Snippets for a whole model: one for each front end, the likely one first; `peak` is the code of an argument."""
    options = f"{peak}, optimizer=optimizer" if has_optimizer else peak
    torch = Snippet(
        "PyTorch",
        "import lowtide.torch as lt\n\n"
        "# once, before training; inputs are what the model is called with\n"
        f"plan = lt.auto_checkpoint(model, *inputs{options})",
    )
    jax = Snippet(
        "JAX",
        "import lowtide.jax as lt\n\n"
        "# inputs are what the loss is called with besides its parameters\n"
        f"plan = lt.plan_model(loss, params, *inputs{options})\n"
        "loss = lt.apply(plan, loss)",
    )
    return (jax, torch) if jax_first else (torch, jax)


def model_file_snippet(*, is_jax: bool) -> Snippet:
    """The snippet for a whole model that reads its plan from a file and applies it."""
    used = "jax as lt\n\nloss = lt.apply(plan, loss)" if is_jax else "torch as lt\n\nlt.apply(plan, model)"
    return Snippet(PLAN_FILE, f"{_READING}\nimport lowtide.{used}")


def as_argument(knob: Knob) -> str:
    """The knob as the code of one more argument; bytes as people write them, if that is exact."""
    if knob.value is None:
        return ""
    written = format_size(knob.value).replace(" ", "")
    is_exact = knob.in_bytes and "," not in written and parse_size(written) == knob.value
    return f', {knob.name}="{written}"' if is_exact else f", {knob.name}={knob.value}"
