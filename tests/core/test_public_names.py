from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

import lowtide


def test_the_public_names_are_frozen() -> None:
    assert sorted(lowtide.__all__) == [
        "Bill",
        "BudgetError",
        "Chain",
        "CheckpointError",
        "Disk",
        "FunctionError",
        "InputError",
        "LowtideError",
        "MissingPackageError",
        "Plan",
        "PlanError",
        "Receipt",
        "StepCost",
        "TapeOption",
        "Working",
        "__version__",
        "frontier",
        "plan_chain",
        "planners",
    ]
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)


MODULES = (
    "lowtide",
    "lowtide.brainstate",
    "lowtide.jax",
    "lowtide.lightning",
    "lowtide.planners",
    "lowtide.report",
    "lowtide.torch",
    "lowtide.torch.checkpoint",
    "lowtide.torch.lean",
    "lowtide.torch.measure",
    "lowtide.torch.spiking",
    "lowtide.transformers",
)


@cache
def completions() -> dict[str, tuple[str, str]]:
    """What `dir` shows of each module and what its `__all__` says, in one fresh process that imports them all."""
    code = (
        f"import importlib\nfor name in {MODULES!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    print('\\n>', name, '|', *dir(module), '|', *sorted(module.__all__))\n"
    )
    output = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    lines = [line[2:].split("|") for line in output.stdout.splitlines() if line.startswith("> ")]
    return {name.strip(): (shown.strip(), public.strip()) for name, shown, public in lines}


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_tab_completion_shows_the_public_names_and_no_others(name: str) -> None:
    shown, public = completions()[name]
    assert shown
    assert shown == public


def test_the_errors_are_what_callers_catch() -> None:
    assert issubclass(lowtide.BudgetError, ValueError)
    assert issubclass(lowtide.PlanError, ValueError)
    assert issubclass(lowtide.CheckpointError, RuntimeError)
    for error in (lowtide.BudgetError, lowtide.InputError, lowtide.PlanError, lowtide.CheckpointError):
        assert issubclass(error, lowtide.LowtideError)


def test_a_fresh_process_loads_no_framework() -> None:
    code = (
        "import sys, lowtide, lowtide.planners.choose, lowtide.planners.frontier\n"
        "allowed = sys.stdlib_module_names | {'lowtide', 'numpy'}\n"
        "loaded = {name.partition('.')[0] for name, module in sys.modules.items() if module is not None}\n"
        "print(*sorted(name for name in loaded if name not in allowed and not name.startswith('_')))\n"
    )
    # -S: no site-packages hooks of other packages; their folder is put back for numpy.
    paths = [path for path in sys.path if path]
    command = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    output = subprocess.run([sys.executable, "-S", "-c", command], capture_output=True, text=True, check=True)
    assert output.stdout.split() == []
