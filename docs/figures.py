"""The figures of the ideas pages, made by the library itself whenever the documentation is built.

Each is drawn twice, for light and for dark pages, as `name-light.svg` and `name-dark.svg`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn

import lowtide.torch as lt
from lowtide import Chain, Plan, StepCost, frontier, plan_chain
from lowtide.report.drawing import PART_INKS, RUN_INKS, size_ticks
from lowtide.report.kinds import ChainKind
from lowtide.report.timeline import RunKind, Timeline, played
from lowtide.sizes import format_size

# On dark pages the darkest inks are lifted, so that they stand out from the ground.
_GROUNDS = {"light": ("#ffffff", "#1f1f1f"), "dark": ("#131416", "#d8d8d8")}
_LIFTED = {"#174a73": "#8fc1e8", "#8f4f05": "#f6c27d", "#6a51a3": "#a994dd", "#2b7bba": "#4d9fdd"}
_STEPS = 24
_PARTS = [PART_INKS[part] for part in ChainKind.memory_parts]


def make_figures(folder: Path) -> None:
    """Draw every figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("schedules", _schedules), ("frontier", _frontier), ("memory", _memory)):
        for ground, (paper, ink) in _GROUNDS.items():
            inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
            style: dict[Any, Any] = dict.fromkeys(inked, ink)
            style |= {"figure.facecolor": paper, "axes.facecolor": paper, "svg.hashsalt": "lowtide", "font.size": 9.0}
            style |= {"axes.spines.top": False, "axes.spines.right": False}
            with rc_context(style):
                shade: Callable[[str], str] = (lambda c: _LIFTED.get(c, c)) if ground == "dark" else (lambda c: c)
                figure = draw(shade)
                figure.savefig(folder / f"{name}-{ground}.svg", metadata={"Date": None})


def _schedules(shade: Callable[[str], str]) -> Figure:
    """Three ways through the same chain: which step runs when, and what memory holds meanwhile."""
    chain = Chain.equal(StepCost(state=1, tape=4), _STEPS)
    plans = {
        "every tape kept": plan_chain(chain, "100%"),
        "no knob: one extra run at most": plan_chain(chain),
        "budget of 9": plan_chain(chain, 9),
    }
    times = {name: played(plan) for name, plan in plans.items()}
    longest = max(timeline.seconds for timeline in times.values())
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    rows = figure.subplots(2, len(plans), sharex=True, sharey="row", height_ratios=(3, 2))
    for (top, below), (name, timeline) in zip(rows.T, times.items(), strict=True):
        _draw_runs(top, timeline, shade)
        _draw_memory(below, timeline, shade)
        plan = plans[name]
        top.set_title(f"{name}\n{plan.bill.peak_memory} bytes, {plan.runs_per_step:.2f} runs per step", fontsize=9)
        below.set(xlabel="time", xlim=(0, longest))
    rows[0, 0].set(ylabel="step", ylim=(-0.5, _STEPS - 0.5))
    rows[1, 0].set_ylabel("bytes held")
    rows[1, 0].text(_STEPS, 2 * _STEPS, "tape", color="white", ha="center", va="center")  # it has forward's colour
    inks = [*RUN_INKS.values(), _PARTS[0]]
    patches = [Patch(color=shade(ink.colour), label="snapshot" if ink is _PARTS[0] else ink.name) for ink in inks]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


def _draw_runs(axes: Axes, timeline: Timeline, shade: Callable[[str], str]) -> None:
    assert timeline.runs is not None
    assert timeline.stored is not None
    for stored in timeline.stored:
        axes.barh(stored.step, stored.stop - stored.start, 0.28, stored.start, color=shade(_PARTS[0].colour))
    for kind in RunKind:
        runs = [run for run in timeline.runs if run.kind is kind]
        spans = [run.stop - run.start for run in runs]
        steps, starts = [run.step for run in runs], [run.start for run in runs]
        axes.barh(steps, spans, 0.9, starts, color=shade(RUN_INKS[kind].colour))


def _draw_memory(axes: Axes, timeline: Timeline, shade: Callable[[str], str]) -> None:
    edges = [moment.start for moment in timeline.memory] + [timeline.memory[-1].stop]
    parts = list(zip(*(moment.parts for moment in timeline.memory), strict=True))
    below = [0] * len(timeline.memory)
    for ink, sizes in zip(_PARTS, parts, strict=True):
        top = [a + b for a, b in zip(below, sizes, strict=True)]
        if any(sizes):
            axes.stairs(top, edges, baseline=below, fill=True, color=shade(ink.colour), label=ink.name)
        below = top


def _frontier(shade: Callable[[str], str]) -> Figure:
    """Runs per step over memory, for the optimum and for simpler rules."""
    chain = Chain.equal(StepCost(state=1024, tape=5 * 1024), 1000)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    rules: Iterator[tuple[str, list[Plan], str, str]] = iter(
        [
            ("budget: the optimum, which is its bound", list(frontier(chain, 48)), "#2b7bba", "-"),
            ("checkpoints: snapshots and one step of tape", _with_checkpoints(chain), "#e08214", "-"),
            ("base: a snapshot every so many steps", _with_bases(chain), "#1b9e77", "o"),
        ]
    )
    for name, plans, colour, form in rules:
        found = [(plan.bill.peak_memory, plan.runs_per_step) for plan in plans]
        axes.plot(*zip(*found, strict=True), form, color=shade(colour), label=name, linewidth=2, markersize=4)
    least = plan_chain(chain)
    axes.plot(least.bill.peak_memory, least.runs_per_step, "D", color=shade("#6a51a3"), label="no knob", markersize=8)
    axes.set(xlabel="peak memory", ylabel="forward runs per step", xscale="log", ylim=(0.8, 8))
    ticks = [8 * 1024 * 4**k for k in range(6)]
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(f"{chain}: {format_size(chain.plain_tape)} without a plan", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def _with_checkpoints(chain: Chain) -> list[Plan]:
    counts = sorted({round(2 ** (k / 4)) for k in range(10, 40)})
    return [plan_chain(chain, checkpoints=count) for count in counts]


def _with_bases(chain: Chain) -> list[Plan]:
    root = math.isqrt(len(chain))
    bases = [base for base in (4, 8, 14, 20, root, 50, 100, 200, 400, 700) if base < len(chain)]
    return [plan_chain(chain, base=base) for base in bases]


def _memory(shade: Callable[[str], str]) -> Figure:
    """What a real spiking network's plan holds over time, beside the budget."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(80, 64), lt.spiking.LIF(tau=20.0), nn.Linear(64, 2), lt.spiking.Expon(tau=10.0))
    plan = lt.plan_for_loop(net, torch.zeros(200, 32, 80), budget="320KiB")
    timeline = played(plan)
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    _draw_memory(axes, timeline, shade)
    budget = plan.knob.value or 0
    axes.axhline(budget, color=shade("#c0392b"), linestyle="--", linewidth=1.5, label="the budget")
    ticks = size_ticks(budget)
    axes.set_yticks([0, *ticks], ["0", *map(format_size, ticks)])
    axes.set(xlabel="time, forward and backward", xlim=(0, timeline.seconds), ylim=(0, budget * 1.08), xticks=[])
    axes.set_title(f"{plan.chain}; {format_size(plan.chain.plain_tape)} without a plan", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
