"""Costs that are the same at every time and place: measured bytes, and counts in place of measured seconds.

Which forms are chosen depends on seconds, and these differ from run to run. The least peak that works must not, or an
error could name one that does not work the next time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lowtide.chain import Chain, StepCost, TapeOption
from lowtide.forms import Form
from lowtide.torch.layers.costs import MeasuredLayers

_LEAN_SECONDS = 0.1  # for making part of a tape again, where running a layer again takes 1


def untimed(chain: Chain, unsettled: Container[tuple[str, Form | None]]) -> Chain:
    """A chain of blocks in which forms that come later on a menu take longer.

    Those that are `unsettled`, each the name of a block and a form, are like keeping everything, and so never
    chosen.
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
    """A row of layers, each of which takes as long as its tape is large."""
    assert row.chain is not None

    def by_bytes(step: StepCost) -> StepCost:
        options = tuple(
            replace(option, extra=_LEAN_SECONDS * max(0, step.tape - option.tape)) for option in step.options
        )
        return replace(step, forward=float(step.tape), backward=2.0 * step.tape, options=options)

    return replace(row, chain=row.chain.with_steps([by_bytes(row.chain[k]) for k in range(len(row.chain))]))
