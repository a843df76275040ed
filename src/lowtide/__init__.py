"""Lowtide trains deep networks and long rollouts in the memory you have.

This package is the planning core: numbers in, plans out. It loads neither torch nor jax.
"""

import logging

from lowtide import planners
from lowtide.chain import Chain, Disk, StepCost, TapeOption, Working
from lowtide.errors import (
    BudgetError,
    CheckpointError,
    FunctionError,
    InputError,
    LowtideError,
    MissingPackageError,
    PlanError,
)
from lowtide.plan import Bill, Plan, Receipt, show_in_notebooks
from lowtide.planners.choose import choose as plan_chain
from lowtide.planners.frontier import frontier
from lowtide.version import __version__


def _notebook_html(thing: Plan | Receipt) -> str:
    """The HTML that a notebook shows for a plan or a receipt; reports are imported only when it is asked for."""
    from lowtide.report import notebook

    return notebook.plan_html(thing) if isinstance(thing, Plan) else notebook.receipt_html(thing)


show_in_notebooks(_notebook_html)
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent, unless the program sets logging up

__all__ = [
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
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
