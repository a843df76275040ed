"""A sheet in a terminal: text, pairs, tables and legends, laid out for some width and encoding, with rich.

Names are always text: markup in them is not applied, and control characters do not reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lowtide.report.glyphs import Glyphs
from lowtide.report.picture import Ink
from lowtide.report.words import clean

MARGIN = 11  # left of the pictures
GAP = 2  # between columns


@dataclass(frozen=True, slots=True)
class Sheet:
    """So many cells wide, in some encoding."""

    width: int
    encoding: str
    glyphs: Glyphs

    def written(self, text: str) -> str:
        """The text without control characters, as the encoding can write it; it keeps its indentation."""
        indented = " " * (len(text) - len(text.lstrip(" "))) + clean(text)
        return indented.encode(self.encoding, "replace").decode(self.encoding)

    def text(self, text: str, style: str = "", most: int | None = None) -> Text:
        """A line of at most `most` cells, or the page's width."""
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
        """Labels and texts; texts wrap."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            table.add_row(self.text(label), Text(self.written(text)))
        return table

    def names(self) -> int:
        """Cells for a name in a table."""
        return min(max(self.width // 3, 12), 44)

    def room(self, lines: Sequence[Sequence[str | Text]], titles: Sequence[str]) -> int:
        """Cells that are left for a table's last column."""
        taken = sum(
            max(cell_len(title), *(cell_len(str(line[place])) for line in lines)) for place, title in enumerate(titles)
        )
        return self.width - taken - GAP * len(titles)

    def table(self, *titles: str) -> Table:
        """A table without lines: the first and the last column are words, the others figures."""
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
        """What the glyphs mean, on as many lines as it takes."""
        line = Text(" " * MARGIN)
        for glyph, ink in entries:
            entry = Text.assemble("" if line.cell_len == MARGIN else "   ", (glyph, ink.colour), f" {ink.name}")
            if line.cell_len > MARGIN and line.cell_len + entry.cell_len > self.width:
                yield line
                line, entry = Text(" " * MARGIN), entry[3:]
            line.append(entry)
        yield line
