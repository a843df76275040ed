from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import InputError
from lowtide.sizes import format_size, parse_budget, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("  64MIB ", 64 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        (".5KiB", 512),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("1024", 1024),
        ("1,024 B", 1024),
        ("12,345,678", 12_345_678),
        ("0.3KiB", 307),  # 307.2 bytes, rounded down
        (7, 7),
        (10**30, 10**30),
        (np.int64(9), 9),
    ],
)
def test_sizes_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("", "not a size"),
        ("MiB", "not a size"),
        ("lots", "not a size"),
        ("-1", "not a size"),
        ("1e9", "not a size"),
        ("nan", "not a size"),
        ("1,02 B", "not a size"),
        ("64 MiB extra", "not a size"),
        ("٦٤MiB", "not a size"),
        ("64M", "the unit 'M' is not one of B, KB"),
        ("64Mb/s", "not a size"),
        ("64 parsecs", "the unit 'parsecs'"),
        ("1.5", "not a whole number of bytes"),
        ("1.5 B", "not a whole number of bytes"),
        ("25%", "a share of nothing"),
        (0, "less than one byte"),
        ("0MiB", "less than one byte"),
        ("0.0001KiB", "less than one byte"),
        (-5, "less than one byte"),
        ("9" * 5000, "not a size"),
        pytest.param(10**5000, "is a number of 16,610 bits", id="5001 digits"),
        (1.5, "is a float"),
        (64.0, "is a float"),
        (float("nan"), "is a float"),
        (float("inf"), "is a float"),
        (True, "is a boolean"),
        (None, "is a NoneType"),
        ([1], "is a list"),
    ],
)
def test_nonsense_is_refused_with_the_accepted_forms(size: object, why: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(size, "state")  # type: ignore[arg-type]  # that is the point
    assert "state" in str(caught.value)
    assert why in str(caught.value)
    assert '"64MiB"' in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_budgets_may_be_a_share() -> None:
    assert parse_budget("25%", 1000) == 250
    assert parse_budget("0.5 %", 1000) == 5
    assert parse_budget("100%", 7) == 7
    assert parse_budget("33.4%", 10) == 3
    assert parse_budget("2KiB", 1000) == 2048


@pytest.mark.parametrize("share", ["0%", "101%", "250%"])
def test_shares_are_between_0_and_100(share: str) -> None:
    with pytest.raises(InputError, match="more than 0% and at most 100%"):
        parse_budget(share, 1000)


@pytest.mark.parametrize("share", ["-5%", "nan%", "%", True, 0.25])
def test_other_shares_are_refused(share: object) -> None:
    with pytest.raises(InputError, match='or "25%"'):
        parse_budget(share, 1000)  # type: ignore[arg-type]  # that is the point


def test_a_share_of_too_little_is_refused() -> None:
    with pytest.raises(InputError, match="less than one byte"):
        parse_budget("1%", 10)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64 MiB"),
        (1010 * 2**20, "1,010 MiB"),
        (2**40, "1 TiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_formatting(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 2**60))
def test_what_is_printed_can_be_read_again(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=1e-3)
