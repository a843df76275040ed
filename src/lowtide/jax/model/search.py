"""The fastest choice of forms whose compiled program keeps the peak."""

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

_MOST_COMPILED = 6  # choices that are compiled to come near the peak
# What is least on paper is not always least when compiled, so these multiples of it are compiled before giving up.
_MULTIPLES_OF_LEAST = (1.0, 1.1, 1.25)

Options = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found.

    Attributes:
        options: an entry of its menu for each step of the chain.
        chain: the parts as a chain; on it the options take what was compiled.
        peak: the bytes that were asked for.
        taken: bytes of the compiled program.
        plain: of the one that keeps everything.
        again: of the other end, see `FormSearch`; None where it was not compiled.
        expected: what the options were thought to take before they were compiled; None if they are an end.
    """

    options: Options
    chain: Chain
    peak: int
    taken: int
    plain: int
    again: int | None
    expected: int | None


class FormSearch:
    """Choices for one model, each compiled when it is asked for.

    What keeps everything is compiled first. It alone does not tell whether what an estimate lacks is in the tapes, and
    goes with them, or is there whatever is chosen. So where more than half of what can be saved has to be, the other
    end is compiled too: all blocks run again but the last, whose tape is needed at once.
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
        """The compiled bytes of a choice at one end, for which nothing is predicted."""
        self._taken[options] = self._compiled(options)
        return self._taken[options]

    def _bytes(self, options: Options, chain: Chain) -> int:
        """The compiled bytes of a choice; what the chain predicts for it is noted before."""
        if options not in self._taken:
            self._expected[options] = Blocks(options).bill(chain).peak_memory
            self._end(options)
        return self._taken[options]

    def _agreeing(self, options: Options) -> Chain:
        """The chain on which a choice takes what was compiled, and so does the one that keeps everything."""
        points = {choice: self._taken[choice] for choice in (self._kept, options)}
        return calibrated(self._rows, self._resident, *points.items())

    def _seconds(self, options: Options) -> float:
        return Blocks(options).bill(self._chain).seconds

    def within(self, peak: int | str) -> Fit:
        """The fastest choice found that keeps a peak.

        Raises:
            BudgetError: none does; `.least` is the smallest that was compiled.
        """
        limit = parse_budget(peak, self.plain, "peak")
        options = self._kept if self.plain <= limit else self._upper(limit) or self._lower(limit)
        again = self._taken.get(self._again) if any(self._again) else None
        taken, expected = self._taken[options], self._expected.get(options)
        return Fit(options, self._agreeing(options), limit, taken, self.plain, again, expected)

    def _upper(self, limit: int) -> Options | None:
        """The fastest choice seen within a limit that is closer to keeping everything than to the least."""
        return self._near(limit, self._chain) if 2 * limit > self.plain + least_peak(self._chain) else None

    def _lower(self, limit: int) -> Options:
        """The same where it is closer to the least, or where no choice was seen."""
        self._end(self._again)
        chain = self._agreeing(self._again)
        return self._near(limit, chain) or self._small(limit, chain)

    def _near(self, limit: int, chain: Chain) -> Options | None:
        """The fastest choice seen that keeps the limit, on the way from this chain to one that nearly fills it."""
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
        """The same choices whatever the limit, so that the least of them works when it is asked for."""
        found: list[Options] = [choose_blocks(chain, int(share * least_peak(chain))) for share in _MULTIPLES_OF_LEAST]
        self._end(self._every)  # to run the last block again too may take more or less: XLA orders it differently
        found += [self._kept, self._again, self._every]
        least = min(self._bytes(options, chain) for options in found)
        while (smaller := self._near(least - 1, chain)) is not None:
            found.append(smaller)
            least = self._taken[smaller]
        if least > limit:
            ways = "raise the peak, or make the step smaller (a smaller batch, more and smaller blocks)"
            raise BudgetError(limit, least, ways, "peak")
        return min((options for options in found if self._taken[options] <= limit), key=self._seconds)
