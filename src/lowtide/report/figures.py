"""The report as a figure for papers: the frontier, the schedule, and memory over time, with matplotlib.

Drawn without pyplot, so that no global state changes and no window opens. Legends stand beside their panels, so that
labels never overlap, whatever the names and numbers are.
"""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.actions import Tier
from lowtide.errors import InputError
from lowtide.packages import needed_for
from lowtide.report.drawing import GRADIENTS, PARAMETERS, RUN_INKS, TIER_INKS, cells, memory_inks, size_ticks
from lowtide.report.kinds import kind_of
from lowtide.report.wording import budget_of, clean, cut, measured_name, times_of
from lowtide.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    from lowtide.plan import Plan
    from lowtide.report.content import Story
    from lowtide.report.timeline import Raster
    from lowtide.report.usual_tools import Mark

SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 200
_PANEL_HEIGHTS = (1.0, 1.15, 1.0)  # relative to each other
_PLAN_COLOUR, _PEER_COLOUR, _MEASURED_COLOUR = "#d7191c", "#000000", "#1b7837"
_MARKERS: tuple[Any, ...] = (*"sD^v<>pPX*dh", (4, 1, 0), (8, 1, 0))  # the last two: stars with 4 and with 8 points
_MOST_MARKS = len(_MARKERS)  # named in a legend, each with a marker of its own
_MOST_TIME_SPAN = 50  # multiple of the least time, above which the frontier is not drawn
_LEAST_LOG_SPAN = 4  # multiple of the least time; a time axis that spans more is logarithmic
_NEAR_LIMIT = 2  # multiple of the peak; a higher limit would flatten the picture, and is only in the legend
_LEGEND_LINES = 15  # lines of a legend that fit beside a panel of the usual height
_LEGEND_LINE = 0.145  # height of a line in inches
_MOST_NAMES = 24  # names of steps along an axis
_STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "text.usetex": False,  # names may have characters that TeX interprets
    "pdf.fonttype": 42,  # type 3 fonts are refused by some journals
    "svg.hashsalt": "lowtide",  # fixed, so that the same figure is the same file
}


def figure(story: Story, path: str | os.PathLike[str] | None = None) -> Figure:
    """The report's three panels; with a `path` ending in .png, .svg or .pdf they are saved there too.

    Raises:
        InputError: another suffix.
        MissingPackageError: matplotlib is not installed.
    """
    check_path(path)
    with needed_for("a figure"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(_STYLE):
        made = Figure(figsize=(7.2, 7.6), layout="constrained")
        grid = made.add_gridspec(3, 1, height_ratios=_PANEL_HEIGHTS)
        frontier, schedule, memory = (made.add_subplot(grid[row]) for row in range(3))
        frontier_axes(frontier, story)
        schedule_axes(schedule, story)
        memory_axes(memory, story)
        _make_room(made, grid, frontier)
        made.align_ylabels()
        if path is not None:
            suffix = Path(path).suffix.lower()
            undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
            made.savefig(path, format=suffix[1:], dpi=_DPI, metadata=undated.get(suffix))
    return made


def check_path(path: str | os.PathLike[str] | None) -> None:
    """Raise `InputError` if the path's suffix is not a format that figures are saved in."""
    if path is not None and Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(
            f"path={os.fspath(path)!r}: a figure is saved as {', '.join(SUFFIXES)}; end the name in one of them"
        )


def frontier_axes(axes: Axes, story: Story) -> None:
    """Draw what each budget buys: time against peak memory, with the plan, the usual tools and measurements marked."""
    best = _best(story)
    # Steps, because a plan is the answer for every budget up to that of the next plan.
    axes.plot(*zip(*best, strict=True), ".-", color="#7f7f7f", ms=3, lw=1, label="frontier", drawstyle="steps-post")
    _marks(axes, story)
    plan = story.plan
    label = f"this plan: {format_size(plan.bill.peak_memory)}, {times_of(plan.time_factor)}"
    axes.plot([plan.bill.peak_memory], [plan.time_factor], "o", color=_PLAN_COLOUR, ms=7, label=label, zorder=5)
    points = [*best, (plan.bill.peak_memory, plan.time_factor)]
    points += [(mark.peak, mark.time_factor) for mark in (*story.peers, *story.measured)]
    _size_axis(axes, story.least, [peak for peak, _ in points])
    _factor_axis(axes, [factor for _, factor in points], [factor for _, factor in points[len(best) :]])
    axes.axvspan(
        axes.get_xlim()[0],
        story.least,
        color="#000000",
        alpha=0.08,
        lw=0,
        label=f"below {format_size(story.least)}: no plan",
    )
    axes.minorticks_off()
    axes.set(
        xlabel="peak memory", ylabel=f"time / {story.kind.plain_name}", title=f"What each {story.kind.limit_name} buys"
    )
    _legend(axes)


def schedule_axes(axes: Axes, story: Story) -> None:
    """Draw which step runs when, and which snapshots are stored meanwhile."""
    plan, timeline = story.plan, story.view.timeline
    length, span = plan.chain.length, _span(plan)
    if timeline.raster is not None:
        _draw_raster(axes, story, timeline.raster, span)
    else:
        _draw_runs(axes, story, span)
    axes.set_xlim(0, span)
    axes.set_ylim(-0.03 * length, 1.03 * length)  # a margin, so that state 0 is not drawn on the edge
    _name_steps(axes, plan)
    axes.set(xlabel=_time_label(plan), title="Schedule")
    _legend(axes)


def memory_axes(axes: Axes, story: Story) -> None:
    """Draw memory over time: its parts, where it peaks and why, the budget and the measured curve."""
    plan, timeline = story.plan, story.view.timeline
    scale = _span(plan) / timeline.seconds
    times = [second * scale for moment in timeline.memory for second in (moment.start, moment.stop)]
    bytes_ = np.array([story.kind.parts_of(moment) for moment in timeline.memory], dtype=float)
    parts = np.repeat(bytes_.T, 2, axis=1)  # twice: at the beginning and at the end of each moment
    held = [(ink, part) for ink, part in zip(memory_inks(story.kind), parts, strict=True) if part.any()]
    if held:
        inks = [ink for ink, _ in held]
        axes.stackplot(
            times,
            [part for _, part in held],
            colors=[ink.colour for ink in inks],
            labels=[ink.name for ink in inks],
            lw=0,
        )
    top = timeline.worst.total
    curve = story.curve
    if curve:
        label = f"measured{story.kind.not_in_curve}, at most {format_size(max(curve))}"
        axes.stairs(
            curve, np.linspace(0, _span(plan), len(curve) + 1), color="#000000", lw=1, label=label, baseline=None
        )
        top = max(top, *curve)
    budget = budget_of(plan)
    if budget is not None:
        axes.axhline(budget, color=_PLAN_COLOUR, ls="--", lw=1, label=f"{story.kind.limit_label} {format_size(budget)}")
        top = max(top, budget) if budget < _NEAR_LIMIT * top else top
    bottom = _held_anyway(axes, plan, top)
    _mark_peak(axes, story, scale)
    axes.set_xlim(0, _span(plan))
    axes.set_ylim(-bottom, 1.12 * top)
    ticks = [0, *size_ticks(top)]
    axes.set_yticks(ticks, [format_size(tick) for tick in ticks])
    axes.set(xlabel=_time_label(plan), ylabel="memory", title="Memory over time")
    _legend(axes)


def _best(story: Story) -> list[tuple[int, float]]:
    """Peak and time of the plans on the frontier: no other plan is at least as good in both."""
    found: list[tuple[int, float]] = []
    for peak, factor in sorted((mark.peak, mark.time_factor) for mark in story.frontier):
        if not found or factor < found[-1][1]:
            found.append((peak, factor))
    return found


def _size_axis(axes: Axes, least: int, peaks: list[int]) -> None:
    """Set a logarithmic x axis of sizes, with about six powers of two labelled."""
    low, high = max(min(least, *peaks), 1) / 1.5, max(peaks) * 1.25
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    lowest, highest = math.ceil(math.log2(low)), math.floor(math.log2(high))
    ticks = [2**power for power in range(lowest, highest + 1, max(1, -(-(highest - lowest) // 5)))]
    if highest - lowest < 3:  # a narrow axis has room for sizes in between
        between = [3 * 2**power // 2 for power in range(max(lowest, 1) - 1, highest + 1)]
        ticks = sorted({*ticks, *(tick for tick in between if low <= tick <= high)})
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])


def _factor_axis(axes: Axes, factors: list[float], marked: list[float]) -> None:
    """Set a y axis of multiples of the plain run's time, logarithmic if they are far apart.

    The least memory may take 100,000 times as long: the curve may leave the panel there, but all marks stay inside.
    """
    axes.margins(y=0.08)
    low, high = min(factors), max(factors)
    if 0 < _LEAST_LOG_SPAN * low < high:
        axes.set_yscale("log")
        if high > _MOST_TIME_SPAN * low:
            high = max(_MOST_TIME_SPAN * low, 1.3 * max(marked))
            axes.set_ylim(low / 1.3, high)
        digits = (1, 2, 5) if high < 200 * low else (1,)
        ticks = [digit * 10**power for power in range(9) for digit in digits if low <= digit * 10**power <= high]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])


def _marks(axes: Axes, story: Story) -> None:
    """Draw the usual tools (hollow) and measurements (filled, green); those beyond the named ones are dots."""
    marks = [(mark, mark.name, _PEER_COLOUR, "none") for mark in story.peers]
    marks += [(mark, _measured_name(mark), _MEASURED_COLOUR, _MEASURED_COLOUR) for mark in story.measured]
    for place, (mark, name, colour, fill) in enumerate(marks):
        named = place < _MOST_MARKS
        axes.plot(
            [mark.peak],
            [mark.time_factor],
            marker=_MARKERS[place] if named else ".",
            ls="none",
            color=colour,
            mfc=fill,
            mew=0.8,
            ms=6,
            zorder=6,  # above the plan's own dot, which is larger
            label=_safe(name, 60) if named else None,
        )
    if len(marks) > _MOST_MARKS:
        axes.plot([], [], ".", color=_MEASURED_COLOUR, ms=6, label=f"and {len(marks) - _MOST_MARKS:,} more")


def _measured_name(mark: Mark) -> str:
    """The mark's name in the legend, which says so if only bytes were measured."""
    return measured_name(mark) + ("" if mark.is_timed else ": bytes alone")


def _draw_runs(axes: Axes, story: Story, span: float) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    timeline = story.view.timeline
    scale = span / timeline.seconds
    for kind, ink in RUN_INKS.items():
        boxes = [
            [(x, run.step), (x, run.step + 1), (end, run.step + 1), (end, run.step)]
            for run in timeline.runs or ()
            if run.kind == kind
            for x, end in [(run.start * scale, run.stop * scale)]
        ]
        if boxes:
            axes.add_collection(
                PolyCollection(boxes, facecolor=ink.colour, edgecolor=ink.colour, lw=0.7, label=ink.name)
            )
    for tier, ink in TIER_INKS.items():
        lives = [
            [(life.start * scale, life.step), (life.stop * scale, life.step)]
            for life in timeline.stored or ()
            if life.tier is tier
        ]
        if lives:
            axes.add_collection(LineCollection(lives, color=ink.colour, lw=0.9, label=ink.name, zorder=0.9))


def _draw_raster(axes: Axes, story: Story, raster: Raster, span: float) -> None:
    from matplotlib.patches import Rectangle

    length = story.plan.chain.length
    picture = cells(story.view.timeline, length, raster.columns, raster.rows)
    axes.imshow(picture.image(), extent=(0, span, 0, length), aspect="auto", interpolation="nearest")
    inks = [ink for kind, ink in RUN_INKS.items() if picture.share[kind].any()]
    inks += [TIER_INKS[tier] for tier, part in ((Tier.MEMORY, picture.memory), (Tier.DISK, picture.disk)) if part.any()]
    for ink in inks:
        axes.add_patch(Rectangle((0, 0), 0, 0, color=ink.colour, label=ink.name, lw=0))  # an empty box, for the legend


def _mark_peak(axes: Axes, story: Story, scale: float) -> None:
    """Mark the peak; its cause is written in the legend, where nothing covers it."""
    from matplotlib.markers import CARETDOWN  # its tip is at the point

    worst = story.view.timeline.worst
    label = _safe(f"peak {format_size(worst.total)}: {worst.what}", 70)
    at = (worst.start + worst.stop) / 2 * scale
    axes.plot([at], [worst.total], marker=CARETDOWN, color="#000000", ms=6, ls="none", label=label, zorder=5)


def _held_anyway(axes: Axes, plan: Plan, top: int) -> float:
    """Draw parameters and gradients below 0, because no budget counts them; returns how far the axis goes below 0.

    They are cut off where they would flatten the rest.
    """
    depth = 0
    for ink, size in zip((PARAMETERS, GRADIENTS), kind_of(plan).besides, strict=True):
        if size:
            label = f"{ink.name} {format_size(size)}, in no budget"
            axes.axhspan(-depth - size, -depth, color=ink.colour, lw=0, label=label)
            depth += size
    return min(depth, 0.3 * top)


def _name_steps(axes: Axes, plan: Plan) -> None:
    from matplotlib.ticker import MaxNLocator

    chain = plan.chain
    if chain.names and chain.length <= 4 * _MOST_NAMES:
        every = -(-chain.length // _MOST_NAMES)
        shown = range(0, chain.length, every)
        axes.set_yticks([k + 0.5 for k in shown], [_safe(chain.name(k), 20) for k in shown], fontsize=6)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.tick_params(axis="y", length=0)
        return
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.set_ylabel("step")


def _span(plan: Plan) -> float:
    """The length of the time axis: the plan's time as a multiple of the plain run's."""
    return plan.time_factor


def _time_label(plan: Plan) -> str:
    return (
        f"predicted time / {kind_of(plan).plain_name}"
        if plan.chain.plain_seconds
        else "predicted time, as a share of the whole"
    )


def _legend(axes: Axes) -> None:
    """Add a legend to the right of the panel; names are wrapped, and shown without interpreting math markup."""
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0, handlelength=1.4)
    for text in legend.get_texts():
        text.set_parse_math(False)
        text.set_text("\n".join(textwrap.wrap(text.get_text(), 32, max_lines=3, placeholder=" ...")))


def _make_room(made: Figure, grid: GridSpec, frontier: Axes) -> None:
    """Make the figure taller if the first panel's legend is longer than the panel."""
    legend = frontier.get_legend()
    assert legend is not None  # it has just been drawn
    lines = sum(1 + text.get_text().count("\n") for text in legend.get_texts())
    more = _LEGEND_LINE * max(0, lines - _LEGEND_LINES)
    usual = made.get_figheight()
    first, *others = _PANEL_HEIGHTS
    made.set_figheight(usual + more)
    # The other panels keep their height.
    grid.set_height_ratios([first + more / usual * sum(_PANEL_HEIGHTS), *others])


def _safe(name: str, most: int) -> str:
    """The name, cut, with a question mark for every character that the figure's font has no glyph for."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known: dict[int, Any] = get_font(findfont(FontProperties())).get_charmap()
    return "".join(letter if ord(letter) in known else "?" for letter in cut(clean(name), most))
