"""What an example of the demo is made of: several ways to the same gradients, and what was measured of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.plan import Plan, Receipt

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way, ready to run: `run` is a forward and a backward that returns gradients, `peak` measures its bytes."""

    run: Callable[[], Sequence[Any]]
    peak: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Contest:
    """An example.

    Attributes:
        title: what is run.
        note: what peak and time are here.
        contestants: how each is made ready, by the tool's name; the plain way comes first.
        clock: seconds so far, of whatever kind the note says.
        repeats: how often each takes its turn; the least counts.
        exact: whether gradients are expected to have the plain way's bits, so that each that differs is counted.
        page: the plan that the report page is about, and what a run of it cost.
    """

    title: str
    note: str
    contestants: Mapping[str, Callable[[], Contestant]]
    clock: Callable[[], float]
    repeats: int
    exact: bool
    page: Callable[[], tuple[Plan, Receipt | None]]


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What one tool took in one example; `seconds` is None where nothing ran."""

    example: str
    tool: str
    peak: int
    plain_peak: int
    seconds: float | None
    time_factor: float
    gradients: str

    @property
    def share(self) -> float:
        """The peak as a share of the plain way's."""
        return self.peak / self.plain_peak
