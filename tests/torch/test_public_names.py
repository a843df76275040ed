"""What users may rely on: names, arguments, docstrings, and that importing Lowtide for torch brings in nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt

LOOP = ["length", "base", "checkpoints", "budget", "plan", "reverse", "unroll", "pbar", "reduce"]
EXTRAS = ["check_rerun", "compile", "generators", "contexts", "captures", "hidden", "advance_with_grad", "lean"]
PLANNING = ["length", "base", "checkpoints", "budget", "reverse", "reduce", "hidden", "lean"]

PARAMETERS = {
    "checkpointed_scan": ["f", "init", "xs", *LOOP, *EXTRAS],
    "checkpointed_for_loop": ["f", "xs", *LOOP, *EXTRAS],
    "checkpointed_while_loop": [
        *["cond", "body", "init", "checkpoints", "budget", "max_steps"],
        *["check_rerun", "generators", "captures", "hidden", "lean"],
    ],
    "scan": ["f", "init", "xs", "length", "reverse", "unroll", "pbar", "reduce"],
    "for_loop": ["f", "xs", "length", "reverse", "unroll", "pbar", "reduce"],
    "plan_scan": ["f", "init", "xs", *PLANNING],
    "plan_for_loop": ["f", "xs", *PLANNING],
    "checkpoint_sequential": ["functions", "segments", "input", "use_reentrant", "preserve_rng_state"],
    "sequential": ["layers", "x", "budget", "plan", "contexts", "check_rerun"],
    "plan_sequential": ["layers", "x", "budget"],
}

POSITIONAL = {
    "checkpointed_scan": ["f", "init", "xs", "length"],
    "checkpointed_for_loop": ["f"],
    "checkpointed_while_loop": ["cond", "body", "init"],
    "scan": ["f", "init", "xs", "length", "reverse", "unroll", "pbar"],
    "for_loop": ["f"],
    "plan_scan": ["f", "init", "xs", "length"],
    "plan_for_loop": ["f"],
    "checkpoint_sequential": ["functions", "segments", "input", "use_reentrant", "preserve_rng_state"],
    "sequential": ["layers", "x"],
    "plan_sequential": ["layers", "x"],
}


def test_the_names_are_these() -> None:
    assert sorted(lt.__all__) == [
        "A100",
        "Batch",
        "BudgetError",
        "CheckpointError",
        "Comparison",
        "Device",
        "H100",
        "Lean",
        "LeanPoint",
        "RTX4090",
        "Recording",
        "Sequential",
        "Steps",
        "apply",
        "auto_checkpoint",
        "checkpoint",
        "checkpoint_sequential",
        "checkpointed_for_loop",
        "checkpointed_scan",
        "checkpointed_while_loop",
        "compare_gradients",
        "for_loop",
        "is_recomputing",
        "largest_batch",
        "lean",
        "lean_frontier",
        "measure",
        "plan_for_loop",
        "plan_model",
        "plan_scan",
        "plan_sequential",
        "record",
        "scan",
        "sequential",
        "spiking",
        "unapply",
    ]
    assert [name for name in lt.__all__ if not hasattr(lt, name)] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_are_these(name: str) -> None:
    parameters = inspect.signature(getattr(lt, name)).parameters.values()
    assert [p.name for p in parameters] == PARAMETERS[name]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[name]
    assert [p.name for p in parameters if p.kind is p.VAR_POSITIONAL] == (["xs"] if name.endswith("for_loop") else [])
    assert [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_KEYWORD)] == []


def test_arguments_of_checkpoint_are_torchs_and_a_few_more() -> None:
    ours = inspect.signature(lt.checkpoint).parameters
    theirs = inspect.signature(torch_checkpoint).parameters
    assert [name for name in theirs if name not in ours] == []
    assert [name for name in ours if name not in theirs] == ["preserve_rng_state", "contexts", "check_rerun"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_knobs_that_are_left_alone_are_off(name: str) -> None:
    knobs = ("base", "checkpoints", "budget", "plan", "pbar", "reduce", "length", "max_steps")
    parameters = inspect.signature(getattr(lt, name)).parameters
    assert all(parameters[knob].default is None for knob in knobs if knob in parameters)


def public() -> dict[str, Any]:
    """Every public function, class and method, by its dotted name."""
    found: dict[str, Any] = {"lowtide.torch": lt}
    for name in lt.__all__:
        thing = getattr(lt, name)
        found[name] = thing
        owned = inspect.ismodule(thing) or inspect.isclass(thing)
        for attribute, value in vars(thing).items() if owned else ():
            documented = inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, property)
            at_home = not inspect.ismodule(thing) or getattr(value, "__module__", "") == thing.__name__
            if documented and at_home and not attribute.startswith("_"):
                found[f"{name}.{attribute}"] = value
    return found


@pytest.mark.parametrize("name", public())
def test_everything_public_is_described(name: str) -> None:
    text = inspect.getdoc(public()[name])
    assert text is not None
    assert len(text.split()) >= 2


@pytest.mark.parametrize(
    "name", ["checkpointed_scan", "checkpointed_while_loop", "scan", "sequential", "checkpoint_sequential"]
)
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(getattr(lt, name)) or ""
    assert [argument for argument in PARAMETERS[name] if f"\n    {argument}: " not in text] == []


@pytest.mark.long
def test_importing_it_brings_in_no_other_framework_and_nothing_to_draw_with() -> None:
    unwanted = ["jax", "matplotlib", "rich", "typer", "snntorch", "spikingjelly", "brainstate"]
    code = f"import sys, lowtide.torch; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
