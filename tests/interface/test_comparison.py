"""What a comparison found, as text."""

from __future__ import annotations

from lowtide import Receipt
from lowtide.interface.comparison import Compared, Comparison


def test_the_text_has_a_row_for_each_and_the_cost_below() -> None:
    rows = (Compared("the result", True, 0.0), Compared("gradient of net.weight", False, 0.012345))
    found = Comparison(
        rows, Receipt(peak_memory=4096), Receipt(plain_runs=1000, taping_runs=500, probe_runs=2, peak_memory=1024)
    )
    assert not found.same
    assert str(found).splitlines() == [
        "the result                               same bits",
        "gradient of net.weight                   differs by up to 0.0123",
        "1,502 runs of a step with Lowtide, at most 1 KiB of tensors, 4 KiB without",
    ]


def test_where_sums_are_made_in_another_order_the_share_is_told() -> None:
    rows = (Compared("the result", True, 0.0, 0.0, 1e-12), Compared("gradient of w", True, 2e-14, 1e-14, 1e-12))
    found = Comparison(rows, Receipt(peak_memory=4096), Receipt(peak_memory=1024))
    assert found.same
    assert found.relative == 1e-14
    assert str(found).splitlines() == [
        "the result                               the same",
        "gradient of w                            differs by 1.0e-14 of it",
        "1 KiB of temporaries, 4 KiB without Lowtide",
    ]
