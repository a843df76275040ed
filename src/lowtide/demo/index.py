"""`index.html`: all results, with links to the pages and pictures beside it. It has no scripts, and works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from lowtide.demo.contest import ResultRow, ToolKind
from lowtide.demo.tables import HEADINGS, MEANING, cells
from lowtide.version import __version__

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #d8dee5; --back: #fff; --ours: #2a7bbf1a;
  --edge: #0005; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa7b4; --line: #36414d; --back: #14191f; --ours: #4aa3e626; --edge: #fff5; }
}
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 0; }
p { color: var(--soft); margin: .3rem 0 .8rem; } a { color: inherit; }
/* Where a table is wider than the page, its edge has a shadow on the side that can be scrolled to. */
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--back) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--back) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / .9rem 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / .9rem 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.ours { background: var(--ours); font-weight: 600; }
img { box-sizing: border-box; width: min(100%, 36rem); height: auto; padding: .8rem; background: #fff;
  border: 1px solid var(--line); border-radius: .6rem; }
@media (max-width: 40rem) {
  body { padding: 1rem; }
  table { font-size: .8rem; line-height: 1.35; }
  th, td { padding: .3rem .35rem; }
  td:first-child { white-space: normal; min-width: 6.5rem; }
  img { padding: .4rem; }
}
"""


def write(
    rows: Sequence[ResultRow], titles: Mapping[str, tuple[str, str]], files: Mapping[str, Sequence[Path]], path: Path
) -> Path:
    """Write the index to `path`: for each example its title and note, its rows, and its files, which are beside it."""
    parts = [
        _example(*titles[example], list(group), files[example])
        for example, group in groupby(rows, key=lambda row: row.example)
    ]
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Lowtide: the demo</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Lowtide {escape(__version__)}: the demo</h1>\n"
        "<p>Each example plain, with the usual tool, and with Lowtide. In the last column:<br>"
        f"{'<br>'.join(map(escape, MEANING.splitlines()))}</p>\n" + "\n".join(parts) + "\n</body></html>\n",
        encoding="utf-8",
    )
    return path


def _example(title: str, note: str, rows: Sequence[ResultRow], files: Sequence[Path]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS[1:])
    body = "\n".join(_row(row) for row in rows)
    links = [f'<a href="{escape(file.name)}">{escape(file.name)}</a>' for file in files]
    alt = escape(f"{title}: the plan")
    pictures = [
        f'<a href="{escape(file.name)}"><img src="{escape(file.name)}" alt="{alt}"></a>'
        for file in files
        if file.suffix == ".png"
    ]
    return (
        f"<h2>{escape(title)}</h2><p>{escape(note)}</p>\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n'
        f"<p>{' · '.join(links)}</p>{''.join(pictures)}"
    )


def _row(row: ResultRow) -> str:
    kind = ' class="ours"' if row.kind is ToolKind.LOWTIDE else ""
    return f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(row)[1:])}</tr>"
