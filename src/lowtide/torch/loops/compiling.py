"""Steps through `torch.compile`: compiled once, the same in first runs and reruns.

`torch.compile` makes one program for a step with grad and another for a step without, and they need not agree in every
bit. The first steps are tried with both. If both agree in several hundred numbers, runs that keep no tape use the
program without grad, which is faster; otherwise they use the other one and drop its tape. The results are those of the
plain loop over the compiled step; if the programs differ later, the comparison of reruns with first runs finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.interface.cache import Cache
from lowtide.torch.loops.outputs import like_of
from lowtide.torch.loops.runner import StepRunner
from lowtide.torch.loops.step import StepFunction
from lowtide.torch.memory import recording
from lowtide.torch.state.bits import same_bits

# Programs that differ do so in about one number of ten, so 512 numbers that agree leave little doubt. Small states need
# more than one step for that many.
_ENOUGH_NUMBERS = 512
_MOST_COMPARED_STEPS = 16
_MOST_FUNCTIONS = 64  # whose compiled form is cached from loop to loop
_MOST_SHAPES = 64  # of one function's carry, for which it is cached whether both programs agree


class _Compiled:
    """A compiled function, and for each tuple of shapes whether its two programs were found to agree."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.call = torch.compile(target)
        self.agrees: Cache[bool] = Cache(_MOST_SHAPES)


# By the function itself, not its `id`: its compiled form refers to it in any case.
_compiled: Cache[_Compiled] = Cache(_MOST_FUNCTIONS)


def use_compiled(runner: StepRunner, target: Callable[..., Any], step: Callable[[Any], StepFunction]) -> None:
    """Make the runner, which is at its beginning, run the step that `step` makes of the compiled `target`."""
    found = _compiled.get(target)
    if found is None:
        found = _compiled.setdefault(target, _Compiled(target))
    runner.use_step(step(found.call))
    shapes = tuple(like_of(leaf) for leaf in runner.begin.leaves)
    agrees = found.agrees.get(shapes)
    if agrees is None:
        agrees = found.agrees.setdefault(shapes, _agrees(runner))
    if not agrees:
        runner.tape_always()


def _agrees(runner: StepRunner) -> bool:
    """Whether the first steps compute the same bits with and without grad."""
    outcomes: list[list[Any]] = []
    for with_grad in (True, False):
        with recording.recomputing():
            outcomes.append(_outcome(runner, with_grad))
        runner.restart()
    pairs = zip(*outcomes, strict=True)
    return all(same_bits(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _outcome(runner: StepRunner, with_grad: bool) -> list[Any]:
    """The states and outputs of the first steps, run with or without grad, keeping no tape."""
    seen: list[Any] = []
    stop = min(_MOST_COMPARED_STEPS, runner.length)
    with runner.ambient.uncached(), torch.set_grad_enabled(with_grad):
        for k, x in enumerate(runner.inputs.rows(0, stop, [])):
            if with_grad:
                runner.root_state(k)
            y = runner.run_carefully(k, x)
            runner.detach_state()
            new = [leaf for leaf in (*runner.state(), *runner.outputs.leaves(k, y)) if isinstance(leaf, torch.Tensor)]
            seen += [leaf.detach().clone() for leaf in new]
            recording.count(probe=1)
            if k and sum(leaf.numel() for leaf in seen) >= _ENOUGH_NUMBERS:
                break
    return seen
