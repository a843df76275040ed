"""A report as two tables in Markdown, to read in a terminal and to paste into an issue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.doctor.findings import Report

_HOLDS = {True: "yes", False: "**NO**", None: "-"}


def markdown(report: Report) -> str:
    """The report as text."""
    bad = sum(finding.holds is False for finding in report.findings)
    good = sum(finding.holds is True for finding in report.findings)
    verdict = f"{bad} of {good + bad} checks do not hold." if bad else f"All {good} checks hold."
    facts = [(fact.name, fact.text) for fact in report.facts]
    findings = [(each.device, each.check, _HOLDS[each.holds], each.text) for each in report.findings]
    return "\n".join(
        [
            *_table(("what", "found"), facts),
            "",
            *_table(("device", "check", "holds", "found"), findings),
            "",
            verdict,
        ]
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table whose columns are as wide as their widest cell, but for the last."""
    cells = [[_clean(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(titles) - 1)]
    for number, row in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        yield f"| {' | '.join([*padded, row[-1]])} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|---|"


def _clean(text: str) -> str:
    """The text on one line, without what would end a cell."""
    return " ".join(text.replace("|", "/").split())
