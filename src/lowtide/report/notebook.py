"""What a notebook shows of a plan or a receipt: static HTML with pictures inside, and no script.

Text has the notebook's own colour and nothing has a background, so it is readable in light and dark themes. No element
has an id, so a notebook may show any number of plans. A plan that would take long to play has no pictures.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

from lowtide.actions import Tier
from lowtide.plan import Plan, Receipt
from lowtide.report.drawing import RUN_INKS, TIER_INKS, Cells, Ink, cells, memory_inks, size_ticks
from lowtide.report.kinds import PlanKind, Section, kind_of
from lowtide.report.timeline import Run, RunKind, Timeline, played
from lowtide.report.wording import budget_of, clean, cut
from lowtide.sizes import format_size

# A plan with more steps or more forward runs is not played here, because every cell that returns a plan shows it.
MOST_STEPS = 200_000
MOST_RUNS = 300_000
_MOST_ROWS = 100  # rows of the table of blocks
_MOST_BOXES = 800  # runs that are drawn one by one; more are drawn as an image
_NEAR_LIMIT = 2  # multiple of the peak; a higher limit would flatten the picture, and is left out
# Pixels of a picture: the margin on the left, the area, and the room for the time axis.
_LEFT, _WIDE, _HIGH, _BELOW = 78, 560, 150, 20
_STYLE = """<style>
.lowtide-print{max-width:46rem;font-size:.9em;line-height:1.45;color:inherit;background:transparent}
.lowtide-print table{border-collapse:collapse;border:0;margin:.3em 0;background:transparent;color:inherit}
.lowtide-print tr,.lowtide-print tbody tr:nth-child(odd),.lowtide-print tr:hover{background:transparent}
.lowtide-print th,.lowtide-print td{text-align:left;vertical-align:top;padding:.05em 1em .05em 0;border:0}
.lowtide-print th,.lowtide-print td{color:inherit;white-space:normal;max-width:none}
.lowtide-print th{font-weight:600;white-space:nowrap}
.lowtide-print .blocks td:nth-child(2),.lowtide-print .blocks td:nth-child(3){text-align:right;white-space:nowrap}
.lowtide-print svg{display:block;max-width:100%;height:auto;margin:.6em 0 0;overflow:visible}
.lowtide-print text{fill:currentColor;font:11px system-ui,sans-serif}
.lowtide-print .axis{stroke:currentColor;stroke-opacity:.35;fill:none}
.lowtide-print .limit{stroke:#d7191c;stroke-dasharray:5 3;fill:none}
.lowtide-print .seen{stroke:currentColor;fill:none}
.lowtide-print .key{font-size:.85em;margin:.1em 0 0 5.5rem}
.lowtide-print .key span{margin-right:1em;white-space:nowrap}
.lowtide-print .key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;vertical-align:-.05em}
.lowtide-print .note{font-size:.85em;opacity:.8;margin:.5em 0 0}
@media (prefers-color-scheme:dark){
.lowtide-print path[fill],.lowtide-print image,.lowtide-print i{filter:brightness(1.15)}
.lowtide-print .limit{stroke:#ff6b5e}}
</style>"""


def plan_html(plan: Plan) -> str:
    """The plan's lines, its blocks or schedule, and memory over time, as one `<div>`."""
    return _div(_plan_parts(plan))


def receipt_html(receipt: Receipt) -> str:
    """The measured cost of a run, with its memory over time if that was recorded, as one `<div>`."""
    return _div(_receipt_parts(receipt))


def _plan_parts(plan: Plan) -> Iterator[str]:
    whole = 'lowtide.report.write(plan, path="plan.html")'
    runs = plan.bill.plain_runs + plan.bill.taping_runs
    kind = kind_of(plan)
    yield _table(kind.lines())
    if Section.BLOCKS in kind.sections:
        yield _blocks(kind)
    if plan.chain.length > MOST_STEPS or runs > MOST_RUNS:
        yield _note(f"{runs:,} runs take a while to play, so there is no picture here; the page has them:", whole)
        return
    timeline = played(plan)
    if Section.SCHEDULE in kind.sections:
        yield from _schedule(plan, timeline)
    yield from _memory(kind, timeline)
    yield _note(f"Every {kind.limit_name}, every tool and the code to paste:", whole)


def _blocks(kind: PlanKind) -> str:
    """The table of a model's blocks."""
    rows = kind.block_rows()
    titles = "".join(f"<th>{title}</th>" for title in ("block", "tape", "time", "decision", "why"))
    told = [
        (row.name, format_size(row.tape), kind.time(row.seconds), row.decision, row.why) for row in rows[:_MOST_ROWS]
    ]
    lines = "".join(f"<tr>{''.join(f'<td>{escape(clean(cell))}</td>' for cell in cells)}</tr>" for cells in told)
    more = f"<p class='note'>and {len(rows) - _MOST_ROWS:,} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table class='blocks'><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>{more}"


def _receipt_parts(receipt: Receipt) -> Iterator[str]:
    yield _table(receipt.lines())
    if receipt.curve:
        top, count = max(max(receipt.curve), 1), len(receipt.curve)
        points = [(_LEFT + _WIDE * place / count, _level(size, top)) for place, size in enumerate(receipt.curve)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}h{_WIDE / count:.2f}" for x, y in points)
        yield _svg(f'<path class="seen" d="{path}"/>{_sizes(top)}{_axes("recorded time")}', "Measured memory over time")
    yield _note("Beside its plan:", 'lowtide.report.write(plan, receipt, path="plan.html")')


def _schedule(plan: Plan, timeline: Timeline) -> Iterator[str]:
    chain, length = plan.chain, plan.chain.length
    picture = cells(timeline, length, _WIDE // 2, _HIGH)
    if timeline.runs is not None and len(timeline.runs) <= _MOST_BOXES:
        drawn = _boxes(timeline, timeline.runs, length)
    else:
        drawn = _image(picture)
    label = clean(chain.name(length - 1)), clean(chain.name(0))
    ends = "".join(
        f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{escape(cut(name, 12))}</text>'
        for name, y in zip(label, (11, _HIGH), strict=True)
    )
    yield _svg(drawn + ends + _axes("predicted time"), "Schedule: steps upwards, time to the right")
    inks = [RUN_INKS[kind] for kind in RunKind if picture.share[kind].any()]
    inks += [TIER_INKS[tier] for tier, part in ((Tier.MEMORY, picture.memory), (Tier.DISK, picture.disk)) if part.any()]
    yield _key(inks)


def _boxes(timeline: Timeline, runs: tuple[Run, ...], length: int) -> str:
    """Every run as a box and every snapshot as a line, one path for each colour."""
    across, up = _WIDE / timeline.seconds, _HIGH / length

    def box(step: int, start: float, stop: float, y: float, high: float) -> str:
        wide = (stop - start) * across
        return f"M{_LEFT + start * across:.2f} {_HIGH - step * up - y:.2f}h{wide:.2f}v{high:.2f}h{-wide:.2f}z"

    drawn = []
    for tier, ink in TIER_INKS.items():
        lives = "".join(
            box(life.step, life.start, life.stop, 0.5, 1) for life in timeline.stored or () if life.tier is tier
        )
        drawn.append(f'<path fill="{ink.colour}" d="{lives}"/>' if lives else "")
    for kind, ink in RUN_INKS.items():
        path = "".join(box(run.step, run.start, run.stop, up, max(up, 1)) for run in runs if run.kind == kind)
        # The outline keeps runs that are thinner than a pixel visible.
        drawn.append(f'<path fill="{ink.colour}" stroke="{ink.colour}" stroke-width=".6" d="{path}"/>' if path else "")
    return "".join(drawn)


def _image(picture: Cells) -> str:
    pixels = picture.image()
    where = f'x="{_LEFT}" y="0" width="{_WIDE}" height="{_HIGH}"'
    style = "image-rendering:pixelated"
    return f'<image {where} preserveAspectRatio="none" style="{style}" href="data:image/png;base64,{_png(pixels)}"/>'


def _png(pixels: np.typing.NDArray[np.uint8]) -> str:
    """RGBA pixels as a PNG in base64."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    high, wide, _ = pixels.shape
    header = struct.pack(">IIBBBBB", wide, high, 8, 6, 0, 0, 0)  # eight bits each of red, green, blue and alpha
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # each line begins with its filter type, 0 for none
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode("ascii")


def _memory(kind: PlanKind, timeline: Timeline) -> Iterator[str]:
    """The parts of memory over time, stacked, with the budget if it is near, and the peak with its cause."""
    worst, budget, inks = timeline.worst, budget_of(kind.plan), memory_inks(kind)
    top = max(worst.total, budget if budget is not None and budget < _NEAR_LIMIT * worst.total else 0)
    across = _WIDE / timeline.seconds
    edges = np.cumsum([(0, *kind.parts_of(moment)) for moment in timeline.memory], axis=1)
    drawn = []
    for part, ink in enumerate(inks):
        if (edges[:, part] == edges[:, part + 1]).all():
            continue
        spans = [(_LEFT + moment.start * across, _LEFT + moment.stop * across) for moment in timeline.memory]
        upper = [
            f"{x:.1f} {_level(y, top):.1f}H{end:.1f}" for (x, end), y in zip(spans, edges[:, part + 1], strict=True)
        ]
        lower = [f"{end:.1f} {_level(y, top):.1f}H{x:.1f}" for (x, end), y in zip(spans, edges[:, part], strict=True)]
        drawn.append(f'<path fill="{ink.colour}" d="M{"L".join([*upper, *reversed(lower)])}z"/>')
    if budget is not None and budget <= top:
        drawn.append(f'<path class="limit" d="M{_LEFT} {_level(budget, top):.1f}h{_WIDE}"/>')
    x, y = _LEFT + (worst.start + worst.stop) / 2 * across, _level(worst.total, top)
    drawn.append(f'<path fill="currentColor" d="M{x:.1f} {y:.1f}l-4 -7h8z"/>')
    yield _svg("".join(drawn) + _sizes(top) + _axes("predicted time"), "Memory over time, stacked")
    held = zip(inks, kind.parts_of(worst), strict=True)
    yield _key(Ink(f"{ink.name} {format_size(size)}", ink.colour) for ink, size in held if size)
    limit = "" if budget is None else f" The dashed line is the {kind.limit_name}, {format_size(budget)}."
    yield f"<p class='note'>Peak {escape(format_size(worst.total))}: {escape(clean(worst.what))}.{escape(limit)}</p>"


def _level(size: float, top: int) -> float:
    """The y coordinate of a size in bytes."""
    return float(_HIGH - size / top * (_HIGH - 8))  # room for the mark above the peak


def _sizes(top: int) -> str:
    """The size ticks on the left axis."""
    return "".join(
        f'<text x="{_LEFT - 6}" y="{_level(size, top) + 4:.1f}" text-anchor="end">{escape(format_size(size))}</text>'
        f'<path class="axis" d="M{_LEFT - 4} {_level(size, top):.1f}h4"/>'
        for size in size_ticks(top, 4)
    )


def _axes(time: str) -> str:
    label = f'<text x="{_LEFT + _WIDE}" y="{_HIGH + 14}" text-anchor="end">{time}</text>'
    return f'<path class="axis" d="M{_LEFT} 0V{_HIGH}H{_LEFT + _WIDE}"/>{label}'


def _svg(drawn: str, title: str) -> str:
    wide, high = _LEFT + _WIDE + 4, _HIGH + _BELOW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 -10 {wide} {high + 10}" width="{wide}" height="{high + 10}">'
        f"<title>{escape(title)}</title>{drawn}</svg>"
    )


def _key(inks: Iterable[Ink]) -> str:
    entries = "".join(f'<span><i style="background:{ink.colour}"></i>{escape(ink.name)}</span>' for ink in inks)
    return f'<div class="key">{entries}</div>'


def _table(lines: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(clean(label))}</th><td>{escape(clean(text))}</td></tr>" for label, text in lines)
    return f"<table><tbody>{rows}</tbody></table>"


def _note(text: str, code: str) -> str:
    return f'<p class="note">{escape(text)} <code>{escape(code)}</code></p>'


def _div(parts: Iterable[str]) -> str:
    return f'<div class="lowtide-print">{_STYLE}{"".join(parts)}</div>'
