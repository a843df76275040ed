"""Lowtide trains deep networks and long rollouts in the memory you have.

This package is the planning core: numbers in, plans out. It loads neither torch nor jax.
"""

from lowtide import planners
from lowtide.chain import Chain, Disk, StepCost, TapeOption, Working
from lowtide.errors import BudgetError, CheckpointError, FunctionError, InputError, LowtideError, PlanError
from lowtide.plan import Bill, Plan, Receipt

__version__ = "0.1.0"

__all__ = [
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
