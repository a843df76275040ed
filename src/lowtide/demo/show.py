"""Runs the examples one after the other: measures, prints, and writes pages and figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide import report
from lowtide.demo import index, paper
from lowtide.demo.contest import Contest, ResultRow
from lowtide.demo.tables import table
from lowtide.demo.turns import measure, pieces
from lowtide.errors import InputError
from lowtide.plan import Plan, Receipt
from lowtide.report import Mark
from lowtide.report.figures import figure
from lowtide.sizes import format_size

PAPER = "paper"
POINTS, QUICK_POINTS = 24, 4  # budgets on a page's slider
_BRAINSTATE = ("jax", "brainstate", "brainpy", "braintools", "brainunit")


@dataclass(frozen=True, slots=True)
class _Example:
    """An example that is run and measured: its module, the packages it imports, and the extra that installs them."""

    module: str
    needs: tuple[str, ...]
    extra: str


_MEASURED = {
    "torch": _Example("spiking_torch", ("torch",), "torch"),
    "jax": _Example("spiking_jax", ("jax",), "jax"),
    "brainstate": _Example("spiking_brainstate", _BRAINSTATE, "brainstate"),
    "segments": _Example("segments", ("torch",), "torch"),
    "heavy": _Example("heavy", ("torch",), "torch"),
}
NAMES = (PAPER, *_MEASURED)


def run(console: Console, output: Path, *, quick: bool = False, only: Sequence[str] | None = None) -> list[ResultRow]:
    """Run the examples, write their pages and pictures to `output`, and return all rows.

    Args:
        console: the console to print on, which also shows the progress bar.
        output: a folder, which is created if needed.
        quick: small sizes and one turn, to check that everything works.
        only: names of examples from `NAMES`; all of them by default.

    Raises:
        InputError: `only` has a name that is not in `NAMES`.
    """
    unknown = [name for name in only or () if name not in NAMES]
    if unknown:
        raise InputError(f"there is no example {unknown[0]!r}; there are {', '.join(NAMES)}")
    output.mkdir(parents=True, exist_ok=True)
    show = _Show(console, output, quick)
    for name in NAMES:
        if not only or name in only:
            show.paper() if name == PAPER else show.measured(name)
    return show.end()


class _Show:
    """Shows examples on the console, and gathers their results."""

    def __init__(self, console: Console, output: Path, quick: bool) -> None:
        self._console, self._output, self._quick = console, output, quick
        self._rows: list[ResultRow] = []
        self._titles: dict[str, tuple[str, str]] = {}
        self._files: dict[str, list[Path]] = {}

    def paper(self) -> None:
        """Show the example that only plans."""
        plan = paper.rollout(quick=self._quick)
        length = len(plan.chain)
        self._begin(
            PAPER,
            f"On paper: a rollout of {length:,} steps in {format_size(plan.knob.value or 0)}",
            "Nothing runs: bytes and time are predicted.",
        )
        self._console.print(Text(str(plan)))
        with self._bar(length) as tell:
            count, bill = paper.played(plan, lambda done: tell("played on paper", done))
        self._say(paper.verdict(plan, count, bill))
        self._say(paper.limit(plan.chain))
        path = self._output / f"{PAPER}.json"
        path.write_text(plan.to_json(), encoding="utf-8")
        self._finish(PAPER, paper.rows(PAPER, plan), plan, None, [path])
        self._console.rule("On paper: the layers of a network, which are unequal")
        self._say(paper.layers())

    def measured(self, name: str) -> None:
        """Measure and show an example, if the packages that it needs are installed."""
        example = _MEASURED[name]
        missing = [package for package in example.needs if find_spec(package) is None]
        if missing:
            self._say(f"{name}: {', '.join(missing)} not installed: pip install 'lowtide[{example.extra}]'")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the usual tools' own warnings, which are not about the demo
            module = import_module(f"lowtide.demo.{example.module}")
            with module.contest(quick=self._quick) as contest:
                self._begin(name, contest.title, contest.note)
                rows, plan, receipt = self._measure(name, contest)
                self._finish(name, rows, plan, receipt)

    def end(self) -> list[ResultRow]:
        """Print all results in one table and where the files are; returns the rows."""
        if self._rows:
            self._console.rule("All examples")
            self._console.print(table(self._rows, examples=True))
            page = index.write(self._rows, self._titles, self._files, self._output / "index.html")
            names = [file.name for files in self._files.values() for file in files]
            self._console.print(Text(f"Open {page}"), soft_wrap=True)  # a wrapped path cannot be copied
            self._say(f"Beside it: {', '.join(names)}")
        return self._rows

    def _begin(self, name: str, title: str, note: str) -> None:
        self._titles[name] = title, note
        self._console.rule(Text(title))
        self._say(note)

    def _measure(self, name: str, contest: Contest) -> tuple[list[ResultRow], Plan, Receipt | None]:
        done = iter(range(pieces(contest) + 1))
        with self._bar(pieces(contest) + 1) as tell:
            rows = measure(name, contest, lambda what: tell(what, next(done)))
            tell("a run for the page", next(done))
            return rows, *contest.page()

    def _finish(
        self, name: str, rows: list[ResultRow], plan: Plan, receipt: Receipt | None, files: Sequence[Path] = ()
    ) -> None:
        self._console.print(table(rows, examples=False))
        page, picture = self._output / f"{name}.html", self._output / f"{name}.png"
        # One story for both, because making it plans and plays every budget of the page's slider.
        points = QUICK_POINTS if self._quick else POINTS
        with self._bar(points + 1) as tell:
            marks = [
                Mark(row.tool, row.peak, row.time_factor, row.gradients) for row in rows if row.seconds is not None
            ]
            story = report.tell(
                plan,
                receipt,
                measured=marks,
                points=points,
                progress=lambda done, _: tell("planning other budgets for the page", done),
            )
            page.write_text(report.page.page(story), encoding="utf-8")
            figure(story, picture)
        self._rows += rows
        self._files[name] = [page, picture, *files]

    def _say(self, text: str) -> None:
        self._console.print(Text(text))

    @contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[str, int], None]]:
        columns = (
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("", total=total)
            yield lambda what, done: progress.update(bar, description=what, completed=done)
