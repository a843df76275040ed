"""What users may rely on: names, arguments, docstrings, and that importing Lowtide for JAX brings in nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import lowtide.jax as lt

LOOP = ["length", "base", "checkpoints", "budget", "plan", "reverse", "unroll", "pbar", "reduce"]
PLANNING = ["length", "base", "checkpoints", "budget", "reduce", "wrt"]

PARAMETERS = {
    "apply": ["plan", "loss"],
    "checkpoint": ["fun", "prevent_cse", "policy", "static_argnums", "static_argnames"],
    "checkpoint_sequential": ["functions", "segments", "input"],
    "checkpointed_scan": ["f", "init", "xs", *LOOP],
    "checkpointed_for_loop": ["f", "xs", *LOOP],
    "checkpointed_while_loop": ["cond", "body", "init", "checkpoints", "budget", "max_steps"],
    "compare_gradients": ["fn", "args", "kwargs"],
    "scan": ["f", "init", "xs", "length", "reverse", "unroll", "pbar", "reduce"],
    "for_loop": ["f", "xs", "length", "reverse", "unroll", "pbar", "reduce"],
    "plan_scan": ["f", "init", "xs", *PLANNING],
    "plan_for_loop": ["f", "xs", *PLANNING],
    "plan_model": ["loss", "params", "args", "peak", "blocks", "optimizer", "has_aux", "donate", "kwargs"],
    "sequential": ["layers", "x", "budget", "plan"],
    "plan_sequential": ["layers", "x", "budget"],
}

POSITIONAL = {
    "apply": ["plan", "loss"],
    "checkpoint": ["fun"],
    "checkpoint_sequential": ["functions", "segments", "input"],
    "checkpointed_scan": ["f", "init", "xs", "length"],
    "checkpointed_for_loop": ["f"],
    "checkpointed_while_loop": ["cond", "body", "init"],
    "compare_gradients": ["fn"],
    "scan": ["f", "init", "xs", "length", "reverse", "unroll", "pbar"],
    "for_loop": ["f"],
    "plan_scan": ["f", "init", "xs", "length"],
    "plan_for_loop": ["f"],
    "plan_model": ["loss", "params"],
    "sequential": ["layers", "x"],
    "plan_sequential": ["layers", "x"],
}


def test_the_names_are_these() -> None:
    assert sorted(lt.__all__) == [
        "BudgetError",
        "CheckpointError",
        "Comparison",
        "apply",
        "checkpoint",
        "checkpoint_sequential",
        "checkpointed_for_loop",
        "checkpointed_scan",
        "checkpointed_while_loop",
        "compare_gradients",
        "for_loop",
        "plan_for_loop",
        "plan_model",
        "plan_scan",
        "plan_sequential",
        "scan",
        "sequential",
    ]
    assert [name for name in lt.__all__ if not hasattr(lt, name)] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_are_these(name: str) -> None:
    parameters = inspect.signature(getattr(lt, name)).parameters.values()
    assert [p.name for p in parameters] == PARAMETERS[name]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[name]
    several = {"compare_gradients": ["args"], "plan_model": ["args"]}.get(
        name, ["xs"] if name.endswith("for_loop") else []
    )
    assert [p.name for p in parameters if p.kind is p.VAR_POSITIONAL] == several


@pytest.mark.parametrize("name", PARAMETERS)
def test_knobs_that_are_left_alone_are_off(name: str) -> None:
    knobs = ("base", "checkpoints", "budget", "plan", "pbar", "reduce", "length", "max_steps", "policy")
    parameters = inspect.signature(getattr(lt, name)).parameters
    given = {"plan"} if name == "apply" else set()
    assert all(parameters[knob].default is None for knob in knobs if knob in parameters and knob not in given)


def test_both_front_ends_take_the_same_knobs() -> None:
    """What is known from one is known from the other; the rest of torch's arguments is about torch."""
    torch = pytest.importorskip("lowtide.torch")
    for name in ("checkpointed_scan", "checkpointed_for_loop", "scan", "for_loop"):
        ours = list(inspect.signature(getattr(lt, name)).parameters)
        assert ours == list(inspect.signature(getattr(torch, name)).parameters)[: len(ours)]


def test_arguments_are_those_of_jax() -> None:
    import jax

    theirs = inspect.signature(jax.checkpoint).parameters
    assert set(PARAMETERS["checkpoint"]) <= set(theirs)
    theirs = inspect.signature(jax.lax.scan).parameters
    assert PARAMETERS["scan"][:6] == list(theirs)[:6]


def public() -> dict[str, Any]:
    """Every public function, class and method, by its dotted name."""
    found: dict[str, Any] = {"lowtide.jax": lt}
    for name in lt.__all__:
        thing = getattr(lt, name, None)
        found[name] = thing
        for attribute, value in vars(thing).items() if inspect.isclass(thing) else ():
            documented = inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, property)
            if documented and not attribute.startswith("_"):
                found[f"{name}.{attribute}"] = value
    return found


@pytest.mark.parametrize("name", public())
def test_everything_public_is_described(name: str) -> None:
    text = inspect.getdoc(public()[name])
    assert text is not None
    assert len(text.split()) >= 2


DESCRIBED = ["checkpoint", "checkpoint_sequential", "checkpointed_scan", "checkpointed_while_loop", "plan_scan", "scan"]


@pytest.mark.parametrize("name", [*DESCRIBED, "sequential", "plan_sequential", "plan_model", "apply"])
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(getattr(lt, name)) or ""
    assert [argument for argument in PARAMETERS[name] if f"\n    {argument}: " not in text] == []


@pytest.mark.long
def test_importing_it_brings_in_no_other_framework_and_nothing_to_draw_with() -> None:
    unwanted = ["torch", "matplotlib", "rich", "typer", "tqdm", "brainstate", "brainunit", "saiunit", "equinox", "flax"]
    code = f"import sys, lowtide.jax; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_importing_it_asks_for_no_device() -> None:
    """So that whoever imports it can still say how many there are."""
    code = "import lowtide.jax, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
