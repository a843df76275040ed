"""The search for the fastest choice of forms whose compiled program stays within the peak."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.errors import BudgetError
from lowtide.jax.model.costs import calibrated, measure_model
from lowtide.jax.model.forms import forms
from lowtide.jax.model.parts import Model
from lowtide.jax.model.program import Program
from lowtide.planners.blocks import Blocks, choose_blocks, least_peak
from lowtide.sizes import parse_budget

_MOST_COMPILED = 6  # choices that are compiled in search of one that nearly fills the peak
# The choice with the least estimate is not always the least when compiled, so choices for these multiples of the least
# estimate are compiled before giving up.
_MULTIPLES_OF_LEAST = (1.0, 1.1, 1.25)

Options = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a search.

    Attributes:
        options: for each step of the chain, the entry of its menu.
        chain: the parts as a chain, on which the options take the bytes of their compiled program.
        peak: the bytes that were asked for.
        taken: the bytes of the compiled program.
        plain: the bytes of the program that keeps everything.
        again: the bytes of the program at the other end (see `FormSearch`); None if it was not compiled.
        expected: the bytes that were predicted for the options before they were compiled; None if they are an end.
    """

    options: Options
    chain: Chain
    peak: int
    taken: int
    plain: int
    again: int | None
    expected: int | None


class FormSearch:
    """The choices for one model, each compiled when its bytes are needed.

    The choice that keeps everything is compiled first. It alone does not show whether the bytes that an estimate lacks
    belong to the tapes, and disappear with them, or are held with any choice. So if more than half of what can be saved
    has to be saved, the other end is compiled too: all blocks run again except for the last, whose tape is needed at
    once.
    """

    def __init__(self, model: Model, program: Program) -> None:
        self._program, self._resident = program, program.resident()
        self._rows, self._menus = measure_model(model), [forms(part) for part in model.parts]
        before = (0,) * self._resident.optimizer_step
        self._parts = slice(len(before), None)
        self._kept = before + (0,) * len(self._rows)
        self._every = before + tuple(min(1, len(menu) - 1) for menu in self._menus)
        last = max((k for k, option in enumerate(self._every) if option), default=0)
        several = sum(self._every) > 1
        self._again = tuple(0 if several and k == last else option for k, option in enumerate(self._every))
        self._taken: dict[Options, int] = {}
        self._expected: dict[Options, int] = {}
        self.plain = self._end(self._kept)
        self._chain = self._agreeing(self._kept)

    def _compiled(self, options: Options) -> int:
        chosen = zip(self._menus, options[self._parts], strict=True)
        return self._program.bytes([menu[k] for menu, k in chosen])

    def _end(self, options: Options) -> int:
        """Compile a choice at one end, for which nothing is predicted; its bytes."""
        self._taken[options] = self._compiled(options)
        return self._taken[options]

    def _bytes(self, options: Options, chain: Chain) -> int:
        """The compiled bytes of a choice; before it is compiled, the chain's prediction is recorded."""
        if options not in self._taken:
            self._expected[options] = Blocks(options).bill(chain).peak_memory
            self._end(options)
        return self._taken[options]

    def _agreeing(self, options: Options) -> Chain:
        """The chain on which this choice, and the one that keeps everything, take the bytes that were compiled."""
        points = {choice: self._taken[choice] for choice in (self._kept, options)}
        return calibrated(self._rows, self._resident, *points.items())

    def _seconds(self, options: Options) -> float:
        return Blocks(options).bill(self._chain).seconds

    def within(self, peak: int | str) -> Fit:
        """The fastest choice found within a peak.

        Raises:
            BudgetError: none is within the peak; `.least` is the smallest number of bytes that was compiled.
        """
        limit = parse_budget(peak, self.plain, "peak")
        options = self._kept if self.plain <= limit else self._upper(limit) or self._lower(limit)
        again = self._taken.get(self._again) if any(self._again) else None
        taken, expected = self._taken[options], self._expected.get(options)
        return Fit(options, self._agreeing(options), limit, taken, self.plain, again, expected)

    def _upper(self, limit: int) -> Options | None:
        """The fastest choice seen within the limit, if that is closer to keeping everything than to the least."""
        return self._near(limit, self._chain) if 2 * limit > self.plain + least_peak(self._chain) else None

    def _lower(self, limit: int) -> Options:
        """The fastest choice seen within a limit that is closer to the least, or for which no choice was seen."""
        self._end(self._again)
        chain = self._agreeing(self._again)
        return self._near(limit, chain) or self._small(limit, chain)

    def _near(self, limit: int, chain: Chain) -> Options | None:
        """The fastest choice within the limit that is seen in the search, from this chain on, for one that fills it."""
        seen = set[Options]()
        for _ in range(_MOST_COMPILED):
            options = choose_blocks(chain, max(limit, least_peak(chain)))
            if options in seen:
                break
            seen.add(options)
            self._bytes(options, chain)
            chain = self._agreeing(options)
        return min((options for options in seen if self._taken[options] <= limit), key=self._seconds, default=None)

    def _small(self, limit: int, chain: Chain) -> Options:
        """The fastest of small choices that do not depend on the limit, so that the least works when asked for."""
        found: list[Options] = [choose_blocks(chain, int(share * least_peak(chain))) for share in _MULTIPLES_OF_LEAST]
        self._end(self._every)  # rerunning the last block too may take more or less: XLA orders the program differently
        found += [self._kept, self._again, self._every]
        least = min(self._bytes(options, chain) for options in found)
        while (smaller := self._near(least - 1, chain)) is not None:
            found.append(smaller)
            least = self._taken[smaller]
        if least > limit:
            ways = "raise the peak, or make the step smaller (a smaller batch, more and smaller blocks)"
            raise BudgetError(limit, least, ways, "peak")
        return min((options for options in found if self._taken[options] <= limit), key=self._seconds)
