"""Result rows as text, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from lowtide.demo.contest import ResultRow, ToolKind
from lowtide.sizes import format_size

HEADINGS = ("example", "tool", "peak", "of plain", "time", "of plain", "gradients")
MEANING = (
    "same bits: every gradient equals the plain one to the last bit\n"
    "off: the largest difference, as a share of the gradient's largest entry"
)
_STYLES = {ToolKind.PLAIN: "dim", ToolKind.USUAL: "", ToolKind.LOWTIDE: "bold"}


def cells(row: ResultRow) -> tuple[str, ...]:
    """The cells of a row as text, in the order of the headings."""
    return (
        row.example,
        row.tool,
        format_size(row.peak),
        _share(row.share),
        "" if row.seconds is None else _duration(row.seconds),
        f"{row.time_factor:.2f}x",
        row.gradients,
    )


def table(rows: Sequence[ResultRow], *, examples: bool) -> Table:
    """A table of all rows; `examples` adds a column with the name of each example, written once."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    first = 0 if examples else 1
    made.caption, made.caption_justify = MEANING if examples else None, "left"
    for place, heading in enumerate(HEADINGS[first:], start=first):
        made.add_column(heading, justify="left" if place < 2 else "right", no_wrap=place != 1)
    for _, group in groupby(rows, key=lambda row: row.example):
        for place, row in enumerate(group):
            name, *rest = cells(row)
            shown = [name if place == 0 else "", *rest]
            made.add_row(*[Text(cell) for cell in shown[first:]], style=_STYLES[row.kind])
        made.add_section()
    return made


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else f"{share:.3%}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
