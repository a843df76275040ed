"""Every exception Lowtide raises, and nothing else.

    LowtideError
    |-- InputError (ValueError)         an argument that cannot be used: what was given, what is accepted
    |   |-- BudgetError                 no plan fits the budget: `.least` is the smallest that works
    |   `-- FunctionError (TypeError)   a function that cannot be used: not callable, wrong result, no such derivative
    |-- PlanError (ValueError)          a plan that breaks the rules: `.place`, `.action`, `.state`
    |-- CheckpointError (RuntimeError)  a run that cannot reproduce the plain run's result
    `-- MissingPackageError (ModuleNotFoundError)   a package that is not installed: what needs it, what installs it

Every message states the numbers involved and a way out.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Anything that Lowtide raises on purpose."""


class InputError(LowtideError, ValueError):
    """An argument that cannot be used; the message says what is accepted."""


class BudgetError(InputError):
    """No plan fits the budget.

    Attributes:
        budget: the bytes that were asked for.
        least: the smallest number of bytes for which a plan exists.
        word: the argument that set them: "budget", or "peak" for a whole training step.
        quick: where the least means many more, a number of bytes with which a step runs at most four times on average;
            None if it does not, or if none is known.
    """

    def __init__(self, budget: int, least: int, remedy: str, word: str = "budget", quick: int | None = None) -> None:
        super().__init__(budget, least, remedy, word, quick)
        self.word = word
        self.budget = budget
        self.least = least
        self.remedy = remedy
        self.quick = quick

    def __str__(self) -> str:
        told = f"no plan fits {self.word}={self.budget:,} B: the least that works is {self.least:,} B; {self.remedy}"
        if self.quick is not None:
            told += f"; with {self.quick:,} B a step runs at most 4 times on average, with the least more often"
        return told


class FunctionError(InputError, TypeError):
    """A function that cannot be used: not callable, a result of the wrong kind, or a derivative it does not support."""


class PlanError(LowtideError, ValueError):
    """A plan that breaks the rules of the chain.

    Attributes:
        place: position of the offending action in the plan, counted from 0.
        action: the offending action, None when the plan ended too early.
        state: text that says what was current, stored and taped when the action was reached.
    """

    def __init__(self, reason: str, *, place: int, action: object, state: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place
        self.action = action
        self.state = state

    def __str__(self) -> str:
        what = "the end of the plan" if self.action is None else f"{self.action}"
        return f"action {self.place:,}, {what}: {self.reason} ({self.state})"


class CheckpointError(LowtideError, RuntimeError):
    """A run that cannot reproduce the plain run's result: raised instead of returning a different one."""


class MissingPackageError(LowtideError, ModuleNotFoundError):
    """A package that is not installed, or too old for what is asked of it.

    Attributes:
        name: the package.
    """
