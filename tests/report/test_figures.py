from __future__ import annotations

import dataclasses
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from lowtide.errors import InputError, MissingPackageError
from lowtide.plan import Receipt
from lowtide.planners.choose import choose
from lowtide.report.content import Story, tell
from lowtide.report.figures import figure, frontier_axes, memory_axes, schedule_axes
from lowtide.report.usual_tools import Mark
from lowtide.sizes import format_size
from tests.report.chains import HOSTILE, measured, network, on_disk, rollout, untimed

PLANS = {
    "base": choose(rollout(), base=20),
    "budget": choose(rollout(), "5%"),
    "wide budget": choose(rollout(2), "50MiB"),
    "raster": choose(rollout(3_000), "1MiB"),
    "long": choose(rollout(100_000), "1MiB"),
    "layers": choose(network(), "60%"),
    "many layers": choose(network(60), "60%"),
    "more layers": choose(network(100), "60%"),
    "hostile": choose(network(5, HOSTILE), "70%"),
    "disk": on_disk(),
    "disk raster": on_disk(2_000),
    "one step": choose(rollout(1)),
    "untimed": untimed(),
}


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [" ".join(text.get_text().split()) for text in legend.get_texts()]


def factors_of(axes: Axes) -> list[float]:
    """The times of the frontier's points."""
    return [float(factor) for factor in np.asarray(axes.lines[0].get_ydata(), dtype=float)]


def overlap(one: Bbox, other: Bbox) -> bool:
    """By more than a pixel of rounding."""
    both = Bbox.intersection(one, other)
    return both is not None and bool(both.width > 1 and both.height > 1)


@pytest.fixture(scope="module", params=PLANS)
def story(request: pytest.FixtureRequest) -> Story:
    return tell(PLANS[request.param], points=5, measured=[Mark(HOSTILE, 70_000, 1.2)])


@pytest.mark.long
def test_three_panels_and_no_label_on_another(story: Story) -> None:
    made = figure(story)
    made.draw_without_rendering()
    assert [panel.get_title(loc="left") for panel in made.axes] == [
        "What each budget buys",
        "Schedule",
        "Memory over time",
    ]
    for panel in made.axes:
        legend = panel.get_legend()
        assert legend is not None
        assert not overlap(legend.get_window_extent(), panel.get_window_extent())
        assert legend.get_window_extent().x1 <= made.bbox.x1 + 1
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            labels = [label for place, label in ticks if low <= place <= high and label.get_text()]
            for one, other in combinations(labels, 2):
                assert not overlap(one.get_window_extent(), other.get_window_extent()), (one, other)
    boxes = [panel.get_tightbbox() for panel in made.axes]
    assert not any(above and below and overlap(above, below) for above, below in combinations(boxes, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_it_is_saved(tmp_path: Path, suffix: str, magic: bytes) -> None:
    story = tell(choose(network(5, HOSTILE), "70%"), points=3)
    path = tmp_path / f"plan{suffix}"
    figure(story, path)
    first = path.read_bytes()
    assert first.startswith(magic)
    figure(story, str(path))
    assert path.read_bytes() == first  # no date, no chance


@pytest.mark.parametrize("name", ["plan.gif", "plan", "plan.png.txt"])
def test_another_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"saved as \.png, \.svg, \.pdf; end the name in one of them"):
        figure(tell(PLANS["base"], points=0), tmp_path / name)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r'pip install "lowtide\[report\]"'):
        figure(tell(PLANS["base"], points=0))


def test_pyplot_is_left_alone() -> None:
    was_there = "matplotlib.pyplot" in sys.modules
    with rc_context({"font.size": 21.0, "text.usetex": True}):
        made = figure(tell(PLANS["base"], points=0))
        made.draw_without_rendering()
    assert made.axes[0].xaxis.label.get_fontsize() == 8.0
    assert ("matplotlib.pyplot" in sys.modules) == was_there


def test_the_frontier() -> None:
    story = tell(PLANS["budget"], measured(150_000), points=8, measured=[Mark("by hand", 100_000, 1.25)])
    axes = Figure().subplots()
    frontier_axes(axes, story)
    shown = legend_of(axes)
    plan = story.plan
    assert f"this plan: {format_size(plan.bill.peak_memory)}, {plan.time_factor:.3f}x" in shown
    assert f"below {format_size(story.least)}: no plan" in shown
    assert {mark.name for mark in story.peers} <= set(shown)
    assert {"measured", "by hand, measured"} <= set(shown)
    factors = factors_of(axes)
    assert factors == sorted(factors, reverse=True)
    assert len(set(factors)) == len(factors)
    low, high = axes.get_ylim()
    assert all(low <= mark.time_factor <= high for mark in (*story.peers, *story.measured))


def test_many_marks_are_counted() -> None:
    marks = [Mark(f"try {k}", 100_000 + k, 1.2) for k in range(20)]
    story = tell(PLANS["base"], points=0, measured=marks)
    axes = Figure().subplots()
    frontier_axes(axes, story)
    assert f"and {len(story.peers) + 20 - 14} more" in legend_of(axes)
    assert sum(np.size(line.get_xdata()) == 1 for line in axes.lines) == len(story.peers) + 20 + 2


@pytest.mark.parametrize("count", [1, 9, 10, 30])
def test_every_mark_with_a_name_has_a_marker_of_its_own(count: int) -> None:
    story = tell(PLANS["base"], points=4, measured=[Mark(f"try {k}", 100_000 + k, 1.2) for k in range(count)])
    axes = Figure().subplots()
    frontier_axes(axes, story)
    handles, names = axes.get_legend_handles_labels()
    drawn = {
        name: line for line, name in zip(handles, names, strict=True) if isinstance(line, Line2D) and line.get_marker()
    }
    peers = [drawn[mark.name] for mark in story.peers]
    tries = [line for name, line in drawn.items() if name.endswith(", measured")]
    assert len(peers) + len(tries) == min(14, len(story.peers) + count)
    assert len({str(line.get_marker()) for line in peers + tries}) == len(peers + tries)
    assert {line.get_markerfacecolor() for line in peers} == {"none"}
    assert not {line.get_color() for line in peers} & {line.get_color() for line in tries}
    unnamed = [line for line in axes.lines if str(line.get_label()).startswith("_child")]
    assert {line.get_marker() for line in unnamed} <= {"."}


@pytest.mark.long
def test_a_long_legend_makes_the_figure_higher_and_no_panel_smaller() -> None:
    few = figure(tell(PLANS["base"], points=4))
    marks = [Mark(f"try {k} of something with a long name", 100_000 + 9 * k, 1.2) for k in range(30)]
    many = figure(tell(PLANS["base"], points=4, measured=marks))
    for made in (few, many):
        made.draw_without_rendering()
    assert many.get_figheight() > few.get_figheight() == 7.6
    for before, after in zip(few.axes, many.axes, strict=True):
        assert after.get_window_extent().height > 0.9 * before.get_window_extent().height
    legends = [panel.get_legend() for panel in many.axes]
    boxes = [legend.get_window_extent() for legend in legends if legend is not None]
    assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
    assert all(box.y0 >= 0 and box.y1 <= many.bbox.y1 for box in boxes)


def test_times_far_apart() -> None:
    for factor, scale in ((1.5, "linear"), (40.0, "log"), (5_000.0, "log")):
        axes = Figure().subplots()
        frontier_axes(axes, tell(PLANS["base"], points=0, measured=[Mark("slow", 100_000, factor)]))
        assert axes.get_yscale() == scale
        assert axes.get_ylim()[1] > factor


def test_the_curve_may_leave_the_panel() -> None:
    axes = Figure().subplots()
    frontier_axes(axes, tell(choose(rollout(2_000), base=40), points=8))
    assert axes.get_ylim()[1] == pytest.approx(50.0)
    assert max(factors_of(axes)) > 300


def test_the_schedule_of_few_runs() -> None:
    story = tell(PLANS["layers"], points=0)
    axes = Figure().subplots()
    schedule_axes(axes, story)
    timeline = story.view.timeline
    assert timeline.runs is not None
    assert timeline.stored is not None
    drawn = sum(len(collection.get_paths()) for collection in axes.collections)
    assert drawn == len(timeline.runs) + len(timeline.stored)
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"layer {k}" for k in range(9)]
    assert "snapshot in memory" in legend_of(axes)
    assert "backward" in legend_of(axes)


def test_the_schedule_of_many_runs() -> None:
    axes = Figure().subplots()
    schedule_axes(axes, tell(PLANS["disk raster"], points=0))
    (image,) = axes.images
    assert isinstance(image, AxesImage)
    assert list(image.get_extent())[2:] == [0, 2_000]
    assert "snapshot on disk" in legend_of(axes)
    assert "snapshot in memory" not in legend_of(axes)
    assert axes.get_ylabel() == "step"


def test_long_chains_name_some_of_their_layers() -> None:
    axes = Figure().subplots()
    schedule_axes(axes, tell(PLANS["many layers"], points=0))
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["layer 0", "layer 3", "layer 6"]
    schedule_axes(axes := Figure().subplots(), tell(PLANS["more layers"], points=0))
    assert axes.get_ylabel() == "step"


def test_memory_over_time() -> None:
    plan = PLANS["budget"]
    peak = plan.bill.peak_memory
    story = tell(plan, measured(2 * peak), points=0)
    axes = Figure().subplots()
    memory_axes(axes, story)
    shown = legend_of(axes)
    assert f"budget {format_size(plan.knob.value or 0)}" in shown
    assert f"measured, at most {format_size(2 * peak)}" in shown
    assert any(entry.startswith(f"peak {format_size(peak)}: ") for entry in shown)
    assert axes.get_ylim()[1] > 2 * peak
    assert axes.get_ylim()[0] == 0
    memory_axes(axes := Figure().subplots(), tell(plan, Receipt(curve=(5, 9)), points=0))
    assert "measured, at most 9 B" in legend_of(axes)


def test_a_budget_far_above_does_not_press_the_picture_flat() -> None:
    axes = Figure().subplots()
    plan = PLANS["wide budget"]
    memory_axes(axes, tell(plan, points=0))
    assert axes.get_ylim()[1] < 2 * plan.bill.peak_memory
    assert "budget 50 MiB" in legend_of(axes)


def test_what_is_held_besides_lies_below_zero() -> None:
    plan = PLANS["layers"]
    for parameters, bottom in ((1_000, -1_500), (10**9, -0.3 * plan.bill.peak_memory)):
        chain = dataclasses.replace(plan.chain, parameters=parameters, gradients=500)
        axes = Figure().subplots()
        memory_axes(axes, tell(choose(chain, plan.bill.peak_memory), points=0))
        assert axes.get_ylim()[0] == pytest.approx(bottom, rel=0.02)
        assert f"parameters {format_size(parameters)}, in no budget" in legend_of(axes)


def test_a_chain_without_time_has_shares_of_the_whole() -> None:
    axes = Figure().subplots()
    schedule_axes(axes, tell(PLANS["untimed"], points=0))
    assert axes.get_xlabel() == "predicted time, as a share of the whole"
    assert axes.get_xlim() == (0, 1)


def test_names_are_text() -> None:
    axes = Figure().subplots()
    schedule_axes(axes, tell(PLANS["hostile"], points=0))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert all(name.startswith("[red]bold[/red]") and len(name) <= 20 for name in names)
    assert not any(set("\x1b\x07\n\u202e") & set(name) for name in names)
