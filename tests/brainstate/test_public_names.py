"""What users may rely on: names, brainstate's own arguments first, docstrings, and who loads brainstate."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from brainstate import transform

import lowtide.brainstate as lt

OURS = ["checkpoints", "budget", "plan", "reverse", "unroll", "reduce"]
PARAMETERS = {
    "checkpointed_scan": ["f", "init", "xs", "length", "base", "pbar", *OURS],
    "checkpointed_for_loop": ["f", "xs", "length", "base", "pbar", *OURS],
    "plan_scan": ["f", "init", "xs", "length", "base", "checkpoints", "budget", "reduce", "wrt"],
    "plan_for_loop": ["f", "xs", "length", "base", "checkpoints", "budget", "reduce", "wrt"],
}


def test_the_names_are_these() -> None:
    assert sorted(lt.__all__) == [
        "checkpointed_for_loop",
        "checkpointed_scan",
        "for_loop",
        "plan_for_loop",
        "plan_scan",
        "scan",
    ]
    assert [name for name in lt.__all__ if not hasattr(lt, name)] == []


@pytest.mark.parametrize("name", ["for_loop", "scan"])
def test_plain_loops_have_brainstates_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters.values() for module in (lt, transform))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("name", ["checkpointed_scan", "checkpointed_for_loop"])
def test_checkpointed_loops_have_brainstates_arguments_first(name: str) -> None:
    ours, theirs = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (lt, transform))
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
    assert [p.name for p in ours[: len(theirs)] if p.default != theirs[ours.index(p)].default] == ["base"]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_are_these(name: str) -> None:
    parameters = inspect.signature(getattr(lt, name)).parameters
    assert list(parameters) == PARAMETERS[name]
    knobs = ("length", "base", "checkpoints", "budget", "plan", "pbar", "reduce")
    assert all(parameters[knob].default is None for knob in knobs if knob in parameters)


@pytest.mark.parametrize("name", lt.__all__)
def test_everything_public_is_described(name: str) -> None:
    assert len((inspect.getdoc(getattr(lt, name)) or "").split()) >= 2


@pytest.mark.parametrize("name", ["checkpointed_scan", "plan_scan"])
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(getattr(lt, name)) or ""
    assert [argument for argument in PARAMETERS[name] if f"\n    {argument}: " not in text] == []


@pytest.mark.parametrize("module", ["lowtide", "lowtide.jax"])
def test_only_who_asks_for_brainstate_loads_it(module: str) -> None:
    unwanted = ["brainstate", "saiunit", "brainunit", "torch", "matplotlib"]
    code = f"import sys, {module}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_it_loads_no_other_framework() -> None:
    unwanted = ["torch", "rich", "typer", "brainpy"]
    code = f"import sys, lowtide.brainstate; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
