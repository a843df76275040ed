from __future__ import annotations

import numpy as np
import pytest

from lowtide.planners.choose import choose
from lowtide.report.drawing import PART_INKS, RUN_INKS, TIER_INKS, cells, size_ticks
from lowtide.report.kinds import ChainKind, ModelKind
from lowtide.report.timeline import RunKind, played
from lowtide.report.usual_tools import Mark
from lowtide.report.wording import clean, cut, figure_of, measured_name, share_of, times_of
from tests.report.chains import HOSTILE, network, on_disk, rollout


@pytest.mark.parametrize("columns", [7, 60, 300])
@pytest.mark.parametrize("rows", [5, 12, 1_000])
def test_every_cell_has_its_share_of_time(columns: int, rows: int) -> None:
    for plan in (choose(rollout(), "5%"), choose(network(), "60%")):
        picture = cells(played(plan), plan.chain.length, columns, rows)
        assert picture.share.shape == (5, columns, min(rows, plan.chain.length))
        assert picture.share.sum(axis=(0, 2)) == pytest.approx(np.ones(columns))
        assert picture.memory.max() <= 1


def test_cells_of_a_short_plan_one_by_one() -> None:
    plan = choose(network(), "100%")  # nothing runs twice: a unit of time for each column
    total = plan.bill.seconds
    picture = cells(played(plan), 9, round(total), 9)
    assert picture.share[RunKind.RERUN].sum() == 0
    assert picture.share[RunKind.FORWARD_TAPED].sum(axis=0) == pytest.approx([1.0 + k for k in range(9)])
    assert picture.share[RunKind.BACKWARD].sum(axis=0) == pytest.approx([2.0 + k for k in range(9)])


def test_a_raster_keeps_its_time_when_it_gets_coarser() -> None:
    plan = choose(rollout(3_000), "1MiB")
    timeline = played(plan)
    assert timeline.raster is not None
    fine = cells(timeline, 3_000, 10_000, 10_000)
    assert fine.share.shape == (5, timeline.raster.columns, timeline.raster.rows)
    coarse = cells(timeline, 3_000, 60, 12)
    assert coarse.share.mean(axis=1).sum() == pytest.approx(fine.share.mean(axis=1).sum())
    assert coarse.memory.mean() == pytest.approx(fine.memory.mean(), rel=0.02)


def test_the_image_shows_runs_above_stored_states() -> None:
    plan = on_disk()
    picture = cells(played(plan), plan.chain.length, 100, 30)
    image = picture.image()
    assert image.shape == (30, 100, 4)
    assert image.dtype == np.uint8
    empty = (picture.share.sum(axis=0) + picture.memory + picture.disk == 0).T[::-1]
    assert (image[..., 3] == 0).sum() == empty.sum()
    forward = tuple(int(RUN_INKS[RunKind.FORWARD].colour[at : at + 2], 16) for at in (1, 3, 5))
    assert tuple(image[-1, 0, :3]) == forward  # step 0 runs first and is the last line


def test_colours_differ() -> None:
    colours = [ink.colour for ink in (*RUN_INKS.values(), *TIER_INKS.values())]
    assert len(set(colours)) == len(colours)
    for kind in (ChainKind, ModelKind):
        assert len({PART_INKS[part].colour for part in kind.memory_parts}) == len(kind.memory_parts)


@pytest.mark.parametrize("top", [1, 5, 6, 1_000, 2**20, 10**9, 3 * 2**40])
def test_ticks_are_few_and_round(top: int) -> None:
    ticks = size_ticks(top)
    assert 1 <= len(ticks) <= 5
    assert ticks[-1] <= top
    unit = ticks[0]
    assert unit & (unit - 1) == 0
    assert ticks == [unit * k for k in range(1, len(ticks) + 1)]


def test_words() -> None:
    assert not set(clean(HOSTILE)) & set("\x1b\x07\x9b\n\r\t\u202e\u2066\ud800")
    assert clean("a\n b\t\x1b[0mc") == "a b [0mc"
    assert cut("layer", 5) == "layer"
    assert cut("layers", 5) == "la..."
    assert (figure_of(1.95), figure_of(166_667.5), figure_of(1.0)) == ("1.95", "166,668", "1")
    assert (times_of(1.0), times_of(99.5), times_of(166_667.5)) == ("1.000x", "99.500x", "166,668x")
    assert (share_of(1, 3), share_of(1, 1_000_000), share_of(2, 1), share_of(0, 5)) == (
        "33.3%",
        "0.0001%",
        "200%",
        "0%",
    )
    assert (measured_name(Mark("measured", 1, 1.0)), measured_name(Mark("a", 1, 1.0))) == ("measured", "a, measured")
