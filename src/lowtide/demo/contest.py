"""What an example of the demo consists of: several tools that make the same gradients, and what each one took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lowtide.plan import Plan, Receipt


class ToolKind(Enum):
    """Whose tool it is."""

    PLAIN = auto()  # no tool: everything is kept
    USUAL = auto()  # what people use without Lowtide
    LOWTIDE = auto()


@dataclass(frozen=True, slots=True)
class Tool:
    """What an example is run with, by the name that tables show."""

    name: str
    kind: ToolKind = ToolKind.USUAL

    def __str__(self) -> str:
        return self.name


PLAIN = Tool("plain", ToolKind.PLAIN)


def with_lowtide(how: str) -> Tool:
    """Lowtide with an option, "budget=64MiB" for example."""
    return Tool(f"Lowtide, {how}", ToolKind.LOWTIDE)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A tool, ready to run: `run` is a forward and a backward and returns gradients, `peak` measures its bytes."""

    run: Callable[[], Sequence[Any]]
    peak: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Contest:
    """An example.

    Attributes:
        title: what is run.
        note: what peak and time mean here.
        contestants: for each tool, how it is made ready; the plain one comes first.
        clock: seconds so far, of the kind that the note names.
        repeats: how many turns each one is timed for; the shortest counts.
        exact: whether gradients should have the bits of the plain ones; if so, those that differ are counted.
        page: makes the plan that the report page is about, and the receipt of a run of it if there is one.
    """

    title: str
    note: str
    contestants: Mapping[Tool, Callable[[], Contestant]]
    clock: Callable[[], float]
    repeats: int
    exact: bool
    page: Callable[[], tuple[Plan, Receipt | None]]


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What one tool took in one example.

    Attributes:
        tool: its name.
        peak: bytes at the worst moment.
        seconds: None where nothing ran.
        time_factor: time as a multiple of the plain one's.
        gradients: how they compare with the plain ones, in words.
        kind: whose tool it is.
    """

    example: str
    tool: str
    peak: int
    plain_peak: int
    seconds: float | None
    time_factor: float
    gradients: str
    kind: ToolKind = ToolKind.USUAL

    @property
    def share(self) -> float:
        """The peak as a share of the plain one's."""
        return self.peak / self.plain_peak
