from __future__ import annotations

import subprocess
import sys

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
        "Plan",
        "PlanError",
        "Receipt",
        "StepCost",
        "TapeOption",
        "Working",
        "__version__",
        "planners",
    ]
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)


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
