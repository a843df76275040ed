"""What the pictures in a terminal are made of, so that they can be read without colour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One letter for each thing that is drawn."""

    kinds: str  # in the order of Kind
    parts: str  # in the order of PARTS
    model_parts: str  # in the order of MODEL_PARTS
    memory: str
    disk: str
    bar: str
    levels: str  # a sparkline's, lowest first
    here: str
    rule: str
    more: str
    limit: str


UNICODE = Glyphs("░▒▞▓█", "▒█·░", "▓▚▪█░", "─", "═", "━", "▁▂▃▄▅▆▇█", "▶", "─", "…", "╌")
ASCII = Glyphs(".o/x#", "o#.:", "%&,#:", "-", "=", "=", "_.-=+*%#", ">", "-", "...", "~")
