"""Costs that are the same in every run: measured bytes, with other numbers in place of measured seconds.

The choice of forms depends on seconds, which differ from run to run. The least peak that works must not differ, or an
error could name one that does not work the next time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lowtide.chain import Chain, StepCost, TapeOption
from lowtide.forms import Form
from lowtide.torch.layers.costs import MeasuredLayers

_LEAN_SECONDS = 0.1  # of recomputing a byte of tape in a lean form; rerunning a layer takes 1 for each byte


def untimed(chain: Chain, unsettled: Container[tuple[str, Form | None]]) -> Chain:
    """The chain with seconds that depend only on the menus: a form that comes later takes longer.

    Forms in `unsettled`, each the name of a block and a form, get the bytes of keeping everything, so that they are
    never chosen.
    """

    def options(name: str, step: StepCost) -> tuple[TapeOption, ...]:
        return tuple(
            replace(option, tape=step.tape, backward=step.working.backward, extra=float(k + 1))
            if (name, option.form) in unsettled
            else replace(option, extra=float(k + 1))
            for k, option in enumerate(step.options)
        )

    steps = [replace(chain[k], options=options(name, chain[k])) for k, name in enumerate(chain.names)]
    return chain.with_steps(steps)


def untimed_layers(row: MeasuredLayers) -> MeasuredLayers:
    """The row of layers with seconds in proportion to bytes: each layer takes as long as its tape is large."""
    assert row.chain is not None

    def by_bytes(step: StepCost) -> StepCost:
        options = tuple(
            replace(option, extra=_LEAN_SECONDS * max(0, step.tape - option.tape)) for option in step.options
        )
        return replace(step, forward=float(step.tape), backward=2.0 * step.tape, options=options)

    return replace(row, chain=row.chain.with_steps([by_bytes(row.chain[k]) for k in range(len(row.chain))]))
