"""The report in a terminal, with rich: verdict, frontier, schedule, memory over time, rows, and the code to paste.

It is readable in 80 columns and in 120, with and without colour, and in plain ASCII if the terminal has nothing else
(`Glyphs`). Names are plain text: markup in them is not applied, and control characters do not reach the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lowtide.actions import Tier
from lowtide.forms import FormKind
from lowtide.report.content import Story
from lowtide.report.decisions import Decision
from lowtide.report.drawing import RUN_INKS, TIER_INKS, Cells, Ink, cells, memory_inks
from lowtide.report.kinds import PlanKind, Section
from lowtide.report.moments import MemoryPart
from lowtide.report.timeline import RunKind
from lowtide.report.usual_tools import Mark
from lowtide.report.wording import budget_of, clean, figure_of, measured_name, share_of, times_of
from lowtide.sizes import format_size


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that things are drawn with."""

    runs: str  # in the order of RunKind
    parts: dict[MemoryPart, str]
    memory: str  # a snapshot stored in memory
    disk: str  # a snapshot stored on disk
    bar: str
    levels: str  # of a sparkline, the lowest first
    here: str  # marks the plan among others
    rule: str
    more: str  # stands for what was cut off
    limit: str


def _of_parts(glyphs: str) -> dict[MemoryPart, str]:
    """The glyphs by part of memory, given in the order in which the parts are defined."""
    return dict(zip(MemoryPart, glyphs, strict=True))


UNICODE = Glyphs("░▒▞▓█", _of_parts("▒█·░▓▚▪█░"), "─", "═", "━", "▁▂▃▄▅▆▇█", "▶", "─", "…", "╌")
ASCII = Glyphs(".o/x#", _of_parts("o#.:%&,#:"), "-", "=", "=", "_.-=+*%#", ">", "-", "...", "~")

# Widths in cells of the terminal.
MARGIN = 11  # left of the pictures
GAP = 2  # between columns of a table


@dataclass(frozen=True, slots=True)
class Layout:
    """Lines, tables and labels that fit a terminal of `width` cells with this encoding."""

    width: int
    encoding: str
    glyphs: Glyphs

    def written(self, text: str) -> str:
        """The text without control characters, as the encoding can write it, with its indentation."""
        indented = " " * (len(text) - len(text.lstrip(" "))) + clean(text)
        return indented.encode(self.encoding, "replace").decode(self.encoding)

    def text(self, text: str, style: str = "", most: int | None = None) -> Text:
        """A line of at most `most` cells, by default the page's width; what does not fit is cut off."""
        made = Text(self.written(text), style, no_wrap=True, overflow="crop")
        most = self.width if most is None else most
        if made.cell_len > most:
            made.truncate(max(most - len(self.glyphs.more), 0), overflow="crop")
            made.append(self.glyphs.more[:most])
        return made

    def wrapped(self, text: str, style: str) -> Text:
        """A paragraph on as many lines as it takes."""
        return Text(self.written(text), style, overflow="fold")

    def heading(self, title: str) -> Rule:
        """A line that begins a section."""
        return Rule(self.text(title, "bold", self.width - 6), characters=self.glyphs.rule, align="left", style="dim")

    def pairs(self, lines: Iterable[tuple[str, str]]) -> Table:
        """A table of labels and texts; texts wrap."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            table.add_row(self.text(label), Text(self.written(text)))
        return table

    def names(self) -> int:
        """The cells that a name may take in a table."""
        return min(max(self.width // 3, 12), 44)

    def room(self, lines: Sequence[Sequence[str | Text]], titles: Sequence[str]) -> int:
        """The cells that are left for a table's last column."""
        taken = sum(
            max(cell_len(title), *(cell_len(str(line[place])) for line in lines)) for place, title in enumerate(titles)
        )
        return self.width - taken - GAP * len(titles)

    def table(self, *titles: str) -> Table:
        """A table without lines: the first and the last column are text, the others numbers."""
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False, collapse_padding=True)
        for place, title in enumerate(titles):
            is_words = place in (0, len(titles) - 1) or title == "decision"
            table.add_column(title, justify="left" if is_words else "right", no_wrap=True, overflow="crop")
        return table

    def label(self, name: str) -> Text:
        """The start of a picture's line, in the margin."""
        label = self.text(name, "", MARGIN - 1)
        line = Text(" " * (MARGIN - 1 - label.cell_len), no_wrap=True, overflow="crop")
        return line.append(label).append(" ")

    def legend(self, entries: list[tuple[str, Ink]]) -> Iterator[Text]:
        """The meaning of each glyph, on as many lines as it takes."""
        line = Text(" " * MARGIN)
        for glyph, ink in entries:
            entry = Text.assemble("" if line.cell_len == MARGIN else "   ", (glyph, ink.colour), f" {ink.name}")
            if line.cell_len > MARGIN and line.cell_len + entry.cell_len > self.width:
                yield line
                line, entry = Text(" " * MARGIN), entry[3:]
            line.append(entry)
        yield line


_MOST_ROWS = 40  # rows of a table
_MOST_BUDGETS = 12  # budgets of the frontier, besides the plan's own
_SCHEDULE_LINES = 12  # the height of the schedule
_MOST_SCHEDULE_LINES = 24  # its height if each line can be a layer
_MEMORY_LINES = 8  # the height of memory over time
_LIMIT_COLOUR = "#d7191c"
_FULL_BAR = 4.0  # a bar is full at this multiple of the plain run's time
_LEAST_BAR = 6  # cells; no bars are drawn in less
_NEAR_LIMIT = 1.5  # multiple of the peak; a higher limit would flatten the picture, and is left out
_LEAST_DECISION = 8  # cells; decisions are not cut any shorter
_LEAST_WHY = 30  # cells; reasons are left out if there are fewer
_STEP_TITLES = ("what", "state", "tape", "again", "stored", "extra", "decision")
_BLOCK_TITLES = ("block", "tape", "time")
_HEADINGS = {
    Section.SCHEDULE: "Schedule: which step runs when, and which snapshots are stored meanwhile",
    Section.MEMORY: "Memory over time",
    Section.STEPS: "What happens to each part of the chain",
    Section.BLOCKS: "What happens to each block",
    Section.CODE: "The code to paste",
}


def render(story: Story) -> RenderableType:
    """The whole report, for `console.print`, which lays it out for the console's width and encoding."""
    return _Report(story)


def show(story: Story, console: Console | None = None) -> None:
    """Print the report on `console`, or on standard output."""
    (console or Console()).print(render(story))


@dataclass(frozen=True, slots=True)
class _Report:
    """The report as a rich renderable."""

    story: Story

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        story, kind = self.story, self.story.kind
        page = _Sections(options.max_width, options.encoding, ASCII if options.ascii_only else UNICODE)
        yield page.heading("Lowtide")
        yield page.wrapped(story.verdict, "bold green" if story.fits else "bold red")
        if story.measuring:
            yield page.wrapped(story.measuring, "yellow" if story.is_measured_above else "")
        yield page.pairs(kind.lines())
        if story.receipt is not None:
            yield page.pairs((f"run's {label}", text) for label, text in story.receipt.lines())
        headings = _HEADINGS | {Section.FRONTIER: kind.frontier_heading}
        for section in kind.sections:
            yield page.heading(headings[section])
            yield from page.section(section, story)


class _Sections(Layout):
    """The sections of the report, each a method that takes the story."""

    def section(self, section: Section, story: Story) -> Iterator[RenderableType]:
        """The contents of a section, which are printed below its heading."""
        drawn: dict[Section, Callable[[Story], Iterator[RenderableType]]] = {
            Section.FRONTIER: self._frontier,
            Section.SCHEDULE: self._schedule,
            Section.MEMORY: self._memory,
            Section.STEPS: self._steps,
            Section.BLOCKS: self._blocks,
            Section.CODE: self._code,
        }
        return drawn[section](story)

    def _frontier(self, story: Story) -> Iterator[Table]:
        """A line for each of a few budgets, including the plan's, then the usual tools and measurements."""
        kind, knob = story.kind, str(story.plan.knob)
        titles = (f"  {kind.frontier_titles[0]}", *kind.frontier_titles[1:])  # indented: two cells mark the plan
        runs = {str(view.plan.knob): view.plan.runs_per_step for view in story.views}
        named = [(self.glyphs.here if mark.name == knob else " ", mark.name, mark) for mark in _some(story)]
        named += [(" ", mark.name, mark) for mark in story.peers]
        named += [(" ", measured_name(mark), mark) for mark in story.measured]
        lines: list[list[str | Text]] = [
            [
                self.text(f"{here} {name}", most=self.names()),
                format_size(mark.peak),
                share_of(mark.peak, kind.whole),
                *_time_cells(kind, mark, runs.get(name)),
            ]
            for here, name, mark in named
        ]
        room, most = self.room(lines, titles), max(mark.time_factor for _, _, mark in named)
        table = self.table(*titles, "")
        for line, (here, _, mark) in zip(lines, named, strict=True):
            drawn = room >= _LEAST_BAR and mark.is_timed
            bar = self.glyphs.bar * max(1, round(room * _bar_length(mark.time_factor, most))) if drawn else ""
            table.add_row(*line, bar, style="bold" if here != " " else "")
        yield table

    def _schedule(self, story: Story) -> Iterator[Text]:
        """Time to the right, steps upwards; each cell shows the kind of run that takes most of its time."""
        chain, width = story.plan.chain, self.width - MARGIN
        height = _MOST_SCHEDULE_LINES if chain.names and chain.length <= _MOST_SCHEDULE_LINES else _SCHEDULE_LINES
        picture = cells(story.view.timeline, chain.length, width, height)
        columns, rows = picture.memory.shape
        for row in reversed(range(rows)):
            first = row * chain.length // rows
            name = chain.name(first) if chain.names and rows == chain.length else f"{first:,}"
            line = self.label(name)
            for column in range(columns):
                line.append(*self._cell(picture, column, row))
            yield line
        yield from self.legend(
            [
                *(
                    (self.glyphs.runs[kind], Ink(RUN_INKS[kind].name, _colour(kind)))
                    for kind in RunKind
                    if picture.share[kind].any()
                ),
                *([(self.glyphs.memory, TIER_INKS[Tier.MEMORY])] if picture.memory.any() else []),
                *([(self.glyphs.disk, TIER_INKS[Tier.DISK])] if picture.disk.any() else []),
            ]
        )

    def _cell(self, picture: Cells, column: int, row: int) -> tuple[str, str]:
        share = picture.share[:, column, row]
        kind = RunKind(int(share.argmax()))
        if share[kind] > 0:
            return self.glyphs.runs[kind], _colour(kind)
        if picture.memory[column, row] > 0:
            return self.glyphs.memory, TIER_INKS[Tier.MEMORY].colour
        return (self.glyphs.disk, TIER_INKS[Tier.DISK].colour) if picture.disk[column, row] > 0 else (" ", "")

    def _memory(self, story: Story) -> Iterator[Text]:
        """The parts of memory over time, stacked, with the budget if it is near, the peak and its cause."""
        timeline, kind, width = story.view.timeline, story.kind, self.width - MARGIN
        worst, inks = timeline.worst, memory_inks(kind)
        glyphs = [self.glyphs.parts[part] for part in kind.memory_parts]
        budget = budget_of(story.plan)
        top = max(worst.total, budget if budget is not None and budget < _NEAR_LIMIT * worst.total else 0)
        held = np.zeros((width, len(inks)))
        for moment in timeline.memory:
            first = min(int(moment.start / timeline.seconds * width), width - 1)
            last = max(int(np.ceil(moment.stop / timeline.seconds * width)), first + 1)
            fuller = held[first:last].sum(axis=1) < moment.total  # a column shows the worst moment of its time
            held[first:last][fuller] = kind.parts_of(moment)
        edges = held.cumsum(axis=1)
        limit = -1 if budget is None or budget > top else min(int(budget / top * _MEMORY_LINES), _MEMORY_LINES - 1)
        for row in reversed(range(_MEMORY_LINES)):
            at = (row + 0.5) / _MEMORY_LINES * top
            mark = {_MEMORY_LINES - 1: format_size(top), 0: "0 B"} | {limit: kind.limit_label}
            line = self.label(mark.get(row, ""))
            for below in edges:
                part = int(np.searchsorted(below, at))
                if part < len(inks):
                    line.append(glyphs[part], inks[part].colour)
                else:
                    line.append(self.glyphs.limit if row == limit else " ", _LIMIT_COLOUR)
            yield line
        parts = zip(glyphs, inks, kind.parts_of(worst), strict=True)
        yield from self.legend(
            [(glyph, Ink(f"{ink.name} {format_size(size)}", ink.colour)) for glyph, ink, size in parts if size]
        )
        yield self.text(f"peak {format_size(worst.total)} after {self._when(story)} of the time: {worst.what}")
        if story.curve:
            yield from self._measured(story.curve, width)
            yield self.text(f"most measured{kind.not_in_curve}: {format_size(max(story.curve))}")

    @staticmethod
    def _when(story: Story) -> str:
        timeline = story.view.timeline
        return f"{(timeline.worst.start + timeline.worst.stop) / 2 / timeline.seconds:.0%}"

    def _measured(self, curve: tuple[int, ...], width: int) -> Iterator[Text]:
        """The measured bytes as one line; a column shows the worst moment of its time."""
        columns = min(width, len(curve))
        starts = np.arange(columns) * len(curve) // columns
        most = np.maximum.reduceat(np.array(curve, dtype=float), starts)
        levels = np.ceil(most / max(most.max(), 1.0) * len(self.glyphs.levels)).astype(int) - 1
        spread = np.arange(width) * columns // width
        line = self.label("measured")
        line.append("".join(self.glyphs.levels[max(level, 0)] for level in levels[spread]))
        yield line

    def _steps(self, story: Story) -> Iterator[RenderableType]:
        """A line for each layer or range of steps, and how many were left out; `extra` is time, as a share of plain."""
        rows, plain = story.view.rows, story.plan.chain.plain_seconds or 1.0
        shown = rows[:_MOST_ROWS]
        lines: list[list[str | Text]] = [
            [
                self.text(row.name, most=self.names()),
                format_size(row.state),
                format_size(row.tape),
                figure_of(row.again),
                f"{row.stored:,}",
                share_of(row.again * row.seconds, plain),
                Text(row.decision, "bold" if row.decision is Decision.KEEP else ""),
            ]
            for row in shown
        ]
        room = self.room(lines, _STEP_TITLES)
        table = self.table(*_STEP_TITLES, "why" if room >= _LEAST_WHY else "")
        for line, row in zip(lines, shown, strict=True):
            form = "" if row.is_whole else f"taped as {row.form}; "
            table.add_row(*line, self.text(form + row.why, most=room) if room >= _LEAST_WHY else "")
        yield table
        yield from self._more(len(rows))

    def _blocks(self, story: Story) -> Iterator[RenderableType]:
        """A line for each block of a model, and how many were left out."""
        kind, rows = story.kind, story.kind.block_rows()
        if not rows:
            yield self.text("there are no blocks to choose for")
            return
        lines: list[list[str | Text]] = [
            [self.text(row.name, most=self.names()), format_size(row.tape), kind.time(row.seconds)]
            for row in rows[:_MOST_ROWS]
        ]
        # Reasons are short, and the first word of a decision says the most, so decisions are cut before reasons are.
        room = self.room(lines, _BLOCK_TITLES)
        most = max(room - max(len(row.why) for row in rows) - GAP, _LEAST_DECISION)
        table = self.table(*_BLOCK_TITLES, "decision", "why")
        for line, row in zip(lines, rows, strict=False):
            form = self.text(row.decision, "bold" if row.kind is FormKind.KEPT else "", most)
            table.add_row(*line, form, self.text(row.why, most=max(room - GAP - most, 0)))
        yield table
        yield from self._more(len(rows))

    def _code(self, story: Story) -> Iterator[Text]:
        """Every snippet, below its name."""
        for snippet in story.kind.snippets():
            yield self.text(f"# {snippet.name}", "bold")
            for line in snippet.code.splitlines():
                yield Text(self.written(line), overflow="fold")
            yield Text("")

    def _more(self, rows: int) -> Iterator[Text]:
        if rows > _MOST_ROWS:
            yield self.text(f"{self.glyphs.more} and {rows - _MOST_ROWS:,} more")


def _colour(kind: RunKind) -> str:
    """The colour of a run. Taped runs differ only by their glyph: darker inks are hard to see on a dark terminal."""
    return RUN_INKS[RunKind(kind - kind % 2)].colour


def _some(story: Story) -> list[Mark]:
    """At most `_MOST_BUDGETS` points of the frontier, evenly spread, and the plan's own."""
    own = str(story.plan.knob)
    different: dict[tuple[int, float, bool], Mark] = {}
    for mark in story.frontier:
        different.setdefault((mark.peak, mark.time_factor, mark.name == own), mark)
    last = len(different) - 1
    places = {round(k * last / (_MOST_BUDGETS - 1)) for k in range(_MOST_BUDGETS)}
    return [mark for place, mark in enumerate(different.values()) if place in places or mark.name == own]


def _time_cells(kind: PlanKind, mark: Mark, runs: float | None) -> tuple[str, str]:
    """The cost of a mark in runs or extra time, and its time; blank if no time is known."""
    return (kind.effort(mark.time_factor, runs), times_of(mark.time_factor)) if mark.is_timed else ("", "")


def _bar_length(factor: float, most: float) -> float:
    """The filled share of a bar: 0 for the plain run's time, 1 for the longest time or for `_FULL_BAR` and above."""
    return min(math.log(factor) / math.log(min(most, _FULL_BAR)), 1.0) if factor > 1.0 else 0.0
