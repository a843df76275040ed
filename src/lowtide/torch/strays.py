"""After the first sweep: what has changed that reruns would not see."""

from __future__ import annotations

from lowtide.errors import CheckpointError
from lowtide.torch.engine import Engine


def refuse_strays(engine: Engine) -> None:
    """Refuse a loop in which a captured tensor, or state that is not carried, was changed; say at which step."""
    if changed := engine.captured.changed():
        raise CheckpointError(
            f"the steps change {', '.join(changed)} in place, so reruns would not repeat; change it after the backward"
        )
    strays = engine.hidden.strays()
    if not strays:
        return
    engine.restart()
    step = engine.first_step_where(lambda: bool(engine.hidden.strays()))
    raise CheckpointError(
        f"step {step:,} is the first to change {', '.join(strays)}, and reruns would not see it; what steps change is "
        f"learned from the first ones, so name it: hidden=({strays[0]!r},)"
    )
