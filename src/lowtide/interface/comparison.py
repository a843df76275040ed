"""The result of comparing gradients with and without Lowtide, in either front end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.plan import Receipt
from lowtide.sizes import format_size


@dataclass(frozen=True, slots=True)
class Compared:
    """One value or gradient, computed with Lowtide and without it.

    Attributes:
        name: what it is.
        same: whether both are the same: to the last bit, or within `rounding` where sums are taken in another order.
        difference: the largest difference; infinite where one side is infinite or NaN and the other is not.
        relative: the difference as a share of the largest entry.
        rounding: the largest such share that counts as rounding; 0 where every bit has to agree.
    """

    name: str
    same: bool
    difference: float
    relative: float = 0.0
    rounding: float = 0.0

    def __str__(self) -> str:
        if self.rounding:
            found = f"differs by {self.relative:.1e} of it" if self.difference else "the same"
        else:
            found = "same bits" if self.same else f"differs by up to {self.difference:.3g}"
        return f"{self.name:<40} {found}"


def share_of(difference: float, largest: float) -> float:
    """A difference as a share of the largest entry; infinite where all entries are 0 and something differs."""
    if largest:
        return difference / largest
    return math.inf if difference else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare_gradients`: a row for each value and gradient, and the cost of both runs.

    Where programs are compiled, the receipts have the bytes that the programs allocate and nothing else.
    """

    rows: tuple[Compared, ...]
    plain: Receipt
    lowtide: Receipt

    @property
    def same(self) -> bool:
        """Whether every row is the same."""
        return all(row.same for row in self.rows)

    @property
    def relative(self) -> float:
        """The largest difference of any row, as a share of that row's largest entry."""
        return max(row.relative for row in self.rows)

    @property
    def plain_bytes(self) -> int:
        """The most bytes at once without Lowtide."""
        return self.plain.peak_memory

    @property
    def lowtide_bytes(self) -> int:
        """The most bytes at once with Lowtide."""
        return self.lowtide.peak_memory

    def __str__(self) -> str:
        ours, plain = format_size(self.lowtide_bytes), format_size(self.plain_bytes)
        runs = self.lowtide.plain_runs + self.lowtide.taping_runs + self.lowtide.probe_runs
        cost = f"{ours} of temporaries, {plain} without Lowtide"
        if runs:
            cost = f"{runs:,} runs of a step with Lowtide, at most {ours} of tensors, {plain} without"
        return "\n".join([*map(str, self.rows), cost])
