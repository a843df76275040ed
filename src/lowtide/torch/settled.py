"""Costs that are the same at every time and place: measured bytes, and counts in place of measured seconds.

Which forms are chosen depends on seconds, and these differ from run to run. The least peak that works must not, or an
error could name one that does not work the next time.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from lowtide.chain import Chain, StepCost, TapeOption
from lowtide.torch.layers import Row

_LEAN = 0.1  # of what it takes to run a layer again, for making its tape again in part


def settled(chain: Chain, unsettled: Container[tuple[str, str]]) -> Chain:
    """A chain of blocks in which forms that come later on a menu take longer.

    Those that are `unsettled`, each the name of a block and that of a form, are like keeping everything, and so never
    chosen.
    """

    def options(name: str, step: StepCost) -> tuple[TapeOption, ...]:
        keep = TapeOption(step.tape, 0.0, "", step.working.backward)
        return tuple(
            replace(keep if (name, option.name) in unsettled else option, name=option.name, extra=float(k + 1))
            for k, option in enumerate(step.options)
        )

    steps = [replace(chain[k], options=options(name, chain[k])) for k, name in enumerate(chain.names)]
    return chain.with_steps(steps)


def settled_row(row: Row) -> Row:
    """A row of layers, each of which takes as long as its tape is large."""
    assert row.chain is not None

    def by_bytes(step: StepCost) -> StepCost:
        options = tuple(replace(option, extra=_LEAN * max(0, step.tape - option.tape)) for option in step.options)
        return replace(step, forward=float(step.tape), backward=2.0 * step.tape, options=options)

    return replace(row, chain=row.chain.with_steps([by_bytes(row.chain[k]) for k in range(len(row.chain))]))
