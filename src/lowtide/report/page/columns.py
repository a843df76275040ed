"""A column of the page's table."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """What it is called in the scripts and on the page, and whether it holds text, a number, bytes or a time."""

    key: str
    label: str
    kind: str
