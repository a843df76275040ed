"""Steps through `torch.compile`: compiled once, the same in first runs and reruns.

`torch.compile` makes one program for a step with grad and another for a step without. Where both give the same bits,
which is tried on the first step, runs that keep no tape use the faster one without grad; else they use the other one
and drop its tape. Either way the results are those of the plain loop over the compiled step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide.torch import recording
from lowtide.torch.bits import same_bits
from lowtide.torch.engine import Engine
from lowtide.torch.outputs import Like, like_of
from lowtide.torch.stepping import StepFunction


class _Compiled:
    """A compiled function, and for which shapes its two programs were found to agree, or not."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.call = torch.compile(target)
        self.agrees: dict[tuple[Like | None, ...], bool] = {}


_compiled: weakref.WeakKeyDictionary[Callable[..., Any], _Compiled] = weakref.WeakKeyDictionary()


def use_compiled(
    engine: Engine, target: Callable[..., Any], step: Callable[[Callable[..., Any]], StepFunction]
) -> None:
    """Let the engine, which is at its beginning, run `step` made of the compiled `target`."""
    if target not in _compiled:
        _compiled[target] = _Compiled(target)
    found = _compiled[target]
    engine.stepper.f = step(found.call)
    shapes = tuple(like_of(leaf) for leaf in engine.begin.leaves)
    if shapes not in found.agrees:
        found.agrees[shapes] = _agrees(engine)
    engine.advance_with_grad |= not found.agrees[shapes]


def _agrees(engine: Engine) -> bool:
    """Whether the first two steps give the same bits with and without grad."""
    outcomes: list[list[Any]] = []
    for with_grad in (True, False):
        with recording.recomputing():
            outcomes.append(_outcome(engine, min(2, engine.length), with_grad))
        engine.restart()
    pairs = zip(*outcomes, strict=True)
    return all(same_bits(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _outcome(engine: Engine, stop: int, with_grad: bool) -> list[Any]:
    """Run the first `stop` steps, keeping nothing; gives the leaves of the state there and of the last output."""
    outputs: list[Any] = []
    with engine.ambient.uncached(), torch.set_grad_enabled(with_grad):
        for k, x in enumerate(engine.inputs.rows(0, stop, [])):
            if with_grad:
                engine.root_state(k)
            engine.carry, engine.leaves, y = engine.stepper.run(k, engine.carry, engine.leaves, x)
            outputs = engine.outputs.leaves(k, y)
            engine.detach_state()
    recording.count(probe=stop)
    return [*engine.state(), *outputs]
