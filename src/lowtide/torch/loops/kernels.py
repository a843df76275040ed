"""Whether a step computes the same bits without grad, where torch may pick other kernels.

It is tried once for each kind of step, with the last of the steps that were probed: one run more, in the first loop. If
its bits differ, steps that keep no tape are run with grad, as with `advance_with_grad=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.interface.cache import Cache
from lowtide.torch.loops.outputs import like_of
from lowtide.torch.loops.runner import Ahead, StepRunner
from lowtide.torch.memory import recording

_MOST_KINDS = 512
_same: Cache[bool] = Cache(_MOST_KINDS)  # by the kind of step


def try_without_grad(runner: StepRunner, ahead: list[Ahead], target: Callable[..., Any]) -> None:
    """Let the runner, which has just run the steps ahead, run steps with grad if they need it."""
    if not runner.may_differ_without_grad:
        return
    modules = tuple((type(module), module.training) for module in runner.hidden.modules)
    kind = (getattr(target, "__code__", type(target)), modules, tuple(map(like_of, runner.state())))
    same = _same.get(kind)
    if same is None:
        snapshot, _ = ahead[-1]
        recording.count(probe=1)
        try:
            same = _same.setdefault(kind, runner.is_same_without_grad(snapshot, len(ahead) - 1))
        except Exception:  # what the step raises only when it is run again: the backward will say so
            return
    if not same:
        runner.tape_always()
