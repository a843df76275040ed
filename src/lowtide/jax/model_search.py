"""The fastest choice of forms whose compiled program keeps the peak."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.chain import Chain
from lowtide.errors import BudgetError
from lowtide.jax.model_costs import calibrated, price
from lowtide.jax.model_forms import forms
from lowtide.jax.model_parts import Model
from lowtide.jax.model_program import Program
from lowtide.planners.blocks import Blocks, FrontierPoint, block_frontier
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
        expected: what the options were thought to take when only that one had been compiled.
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
        self._seen: dict[Options, int] = {}
        self.plain = self._bytes(self._kept)

    @property
    def _kept(self) -> Options:
        return self._before + (0,) * len(self._rows)

    def _bytes(self, options: Options) -> int:
        if options not in self._seen:
            chosen = options[len(self._before) :]
            self._seen[options] = self._program.bytes([menu[k] for menu, k in zip(self._menus, chosen, strict=True)])
        return self._seen[options]

    def _calibrated(self, options: Options) -> Chain:
        return calibrated(self._rows, self._fixed, options, self._bytes(options))

    def within(self, peak: int | str) -> Fit:
        """The fastest choice found that keeps a peak.

        Raises:
            BudgetError: none does; `.least` is the smallest that was compiled.
        """
        limit = parse_budget(peak, self.plain, "peak")
        options = self._kept if self.plain <= limit else self._near(limit) or self._small(limit)
        expected = Blocks(options).bill(self._calibrated(self._kept)).peak_memory
        chain = self._calibrated(options)
        return Fit(options, chain, limit, self._bytes(options), self.plain, expected)

    def _near(self, limit: int) -> Options | None:
        """The fastest choice seen that keeps the limit, on the way to one that nearly fills it."""
        best: FrontierPoint | None = None
        seen: set[Options] = set()
        chain = self._calibrated(self._kept)
        for _ in range(_ROUNDS):
            points = block_frontier(chain)
            point = next((point for point in points if point.peak <= limit), points[-1])
            if point.options in seen:
                break
            seen.add(point.options)
            if self._bytes(point.options) <= limit and (best is None or point.extra < best.extra):
                best = point
            chain = self._calibrated(point.options)
        return None if best is None else best.options

    def _small(self, limit: int) -> Options:
        """The same choices whatever the limit, so that the least of them works when it is asked for."""
        points = block_frontier(self._calibrated(self._kept))
        least = points[-1].peak
        small = [next(point for point in points if point.peak <= share * least) for share in _LEAST]
        again = tuple(min(1, len(menu) - 1) for menu in self._menus)
        found = {options: self._bytes(options) for options in (*(p.options for p in small), self._before + again)}
        fits = [options for options, taken in found.items() if taken <= limit]
        if not fits:
            ways = "raise the peak, or make the step smaller (a smaller batch, more and smaller blocks)"
            raise BudgetError(limit, min(self.plain, *found.values()), ways)
        return fits[-1]
