"""What treating a stretch of unequal steps holds, beyond what is held below it; shared by all planners for them."""

from __future__ import annotations

from lowtide.chain import Chain


class MemoryNeeds:
    """The chain's bytes, in units of `unit` bytes.

    With a unit above 1, sizes are rounded so that the *sum* over any stretch is within one unit of the truth: each is
    the difference of two rounded running totals. Rounding every size by itself would add up to a fifth.
    """

    def __init__(self, chain: Chain, unit: int = 1) -> None:
        steps = [chain[k] for k in range(len(chain))]
        self.state = _spread([step.state for step in steps], unit)
        forms = max(len(step.menu) for step in steps)
        columns = [
            _spread([step.menu[min(form, len(step.menu) - 1)].tape for step in steps], unit) for form in range(forms)
        ]
        self.tapes = [[columns[form][k] for form in range(len(step.menu))] for k, step in enumerate(steps)]
        self.advance = [-(-step.working.advance // unit) for step in steps]
        self.tape = [-(-step.working.tape // unit) for step in steps]
        self.pulling = [[-(-backward // unit) for backward in step.pulling] for step in steps]
        # While [s, t) is treated, the cotangent of state t is there, unless t is the end of the chain.
        self.cotangent = [-(-step.cotangent // unit) for step in steps[1:]] + [0]

    def beside_tape(self, start: int, stop: int, form: int) -> int:
        """Room that step `start` needs beside its own tape, when [start, stop) is treated by taping it so first."""
        return max(self.tape[start] + self.cotangent[stop - 1], self.pulling[start][form])

    def running(self, start: int, middle: int, stop: int) -> int:
        """Room for running [start, middle) from a stored start, when [start, stop) is treated."""
        return self.state[start] + max(self.advance[start:middle]) + self.cotangent[stop - 1]

    def parts(self, start: int, stop: int, room: int, decision: int) -> list[tuple[int, int, int]]:
        """The stretches (start, stop, room) that a decision leaves to treat; the one to treat first comes last.

        A decision n > 0 stores state `start` and advances n steps; n <= 0 tapes step `start` in form -n.
        """
        if decision > 0:
            middle = start + decision
            return [(start, middle, room), (middle, stop, room - self.state[start])]
        if stop - start > 1:
            return [(start + 1, stop, room - self.tapes[start][-decision])]
        return []


def _spread(sizes: list[int], unit: int) -> list[int]:
    total, rounded, spread = 0, 0, []
    for size in sizes:
        total += size
        reached = (total + unit // 2) // unit
        spread.append(reached - rounded)
        rounded = reached
    return spread
