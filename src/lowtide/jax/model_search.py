"""The fastest choice of forms whose compiled program keeps the peak."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.errors import BudgetError
from lowtide.jax.model_costs import calibrated, price
from lowtide.jax.model_forms import forms
from lowtide.jax.model_parts import Model
from lowtide.jax.model_program import Program
from lowtide.planners.blocks import Blocks, choose_blocks, least_peak
from lowtide.sizes import parse_budget

# So many choices are compiled to come near the peak.
_ROUNDS = 6
# What is least on paper is not always least when compiled, so these multiples of it are compiled before giving up.
_LEAST = (1.0, 1.1, 1.25)

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
        expected: what the options were thought to take before they were compiled.
    """

    options: Options
    chain: Chain
    peak: int
    taken: int
    plain: int
    expected: int


class Search:
    """Choices for one model, each compiled when it is asked for."""

    def __init__(self, model: Model, program: Program) -> None:
        self._program, self._fixed = program, program.fixed()
        self._rows, self._menus = price(model), [forms(part) for part in model.parts]
        self._before = (0,) * self._fixed.optimizer_step
        self._kept = self._before + (0,) * len(self._rows)
        self.plain = self._compiled(self._kept)
        self._taken = {self._kept: self.plain}
        self._expected = dict(self._taken)
        self._first = self._latest = calibrated(self._rows, self._fixed, (self._kept, self.plain))

    def _compiled(self, options: Options) -> int:
        chosen = zip(self._menus, options[len(self._before) :], strict=True)
        return self._program.bytes([menu[k] for menu, k in chosen])

    def _bytes(self, options: Options) -> int:
        """What a choice takes; from then on estimates agree with that, and with what keeping everything takes."""
        if options not in self._taken:
            self._expected[options] = Blocks(options).bill(self._latest).peak_memory
            self._taken[options] = self._compiled(options)
            self._latest = self._agreeing(options)
        return self._taken[options]

    def _agreeing(self, options: Options) -> Chain:
        points = {choice: self._taken[choice] for choice in (self._kept, options)}
        return calibrated(self._rows, self._fixed, *points.items())

    def _seconds(self, options: Options) -> float:
        return Blocks(options).bill(self._first).seconds

    def within(self, peak: int | str) -> Fit:
        """The fastest choice found that keeps a peak.

        Raises:
            BudgetError: none does; `.least` is the smallest that was compiled.
        """
        limit = parse_budget(peak, self.plain, "peak")
        options = self._kept if self.plain <= limit else self._near(limit) or self._small(limit)
        taken, expected = self._taken[options], self._expected[options]
        return Fit(options, self._agreeing(options), limit, taken, self.plain, expected)

    def _near(self, limit: int) -> Options | None:
        """The fastest choice seen that keeps the limit, on the way to one that nearly fills it."""
        chain, seen = self._first, set[Options]()
        for _ in range(_ROUNDS):
            options = choose_blocks(chain, max(limit, least_peak(chain)))
            if options in seen:
                break
            seen.add(options)
            self._bytes(options)
            chain = self._agreeing(options)
        return min((options for options in seen if self._bytes(options) <= limit), key=self._seconds, default=None)

    def _small(self, limit: int) -> Options:
        """The same choices whatever the limit, so that the least of them works when it is asked for."""
        found: list[Options] = [choose_blocks(self._first, int(share * least_peak(self._first))) for share in _LEAST]
        found += [self._kept, self._before + tuple(min(1, len(menu) - 1) for menu in self._menus)]
        least = min(map(self._bytes, found))
        while (smaller := self._near(least - 1)) is not None:
            found.append(smaller)
            least = self._bytes(smaller)
        if least > limit:
            ways = "raise the peak, or make the step smaller (a smaller batch, more and smaller blocks)"
            raise BudgetError(limit, least, ways)
        return min((options for options in found if self._bytes(options) <= limit), key=self._seconds)
