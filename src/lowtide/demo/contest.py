"""An example of the demo: several tools that compute the same gradients, and what each one took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lowtide.plan import Plan, Receipt


class ToolKind(Enum):
    """The kind of a tool."""

    PLAIN = auto()  # no tool: everything is kept
    USUAL = auto()  # what people use without Lowtide
    LOWTIDE = auto()


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an example is run with, by the name that tables show."""

    name: str
    kind: ToolKind = ToolKind.USUAL

    def __str__(self) -> str:
        return self.name


PLAIN = Tool("plain", ToolKind.PLAIN)


def with_lowtide(how: str) -> Tool:
    """Lowtide as a tool, with an option, "budget=64MiB" for example."""
    return Tool(f"Lowtide, {how}", ToolKind.LOWTIDE)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A tool, ready to run: `run` runs a forward and a backward and returns gradients, `peak` measures its bytes."""

    run: Callable[[], Sequence[Any]]
    peak: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Contest:
    """An example.

    Attributes:
        title: what is run.
        note: what peak and time mean here.
        contestants: for each tool, a function that makes it ready; the plain run comes first.
        clock: returns seconds, of the kind that the note names.
        repeats: how often each tool is timed; the shortest time counts.
        exact: whether gradients should equal the plain ones bit for bit; if so, numbers that differ are counted.
        page: returns the plan that the report page is about, and the receipt of a run of it if there is one.
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
        example: the name of the example.
        tool: the name of the tool.
        peak: its peak memory in bytes.
        plain_peak: that of the plain run.
        seconds: its time; None if nothing ran.
        time_factor: its time as a multiple of the plain run's.
        gradients: how its gradients compare with the plain ones, in words.
        kind: the kind of the tool.
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
        """The peak as a share of the plain run's."""
        return self.peak / self.plain_peak
