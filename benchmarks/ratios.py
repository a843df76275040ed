"""What the benchmarks share: the ratios they find, the loop that times them, and how they are started.

A benchmark is a script with `main(arguments) -> list[Ratio]`, started by `command(main)`. It prints as it goes. With
`--ratios FILE` the ratios are written there too, as JSON; that is how `lowtide bench` gets them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Ratio:
    """A figure that means the same on every machine, and the most it may be; None where nothing is promised.

    Without a value it was not measured, and `why` says why not.
    """

    what: str
    value: float | None
    limit: float | None = None
    why: str = ""

    @property
    def kept(self) -> bool | None:
        """Whether the limit is kept; None without a limit or a value."""
        return None if self.value is None or self.limit is None else self.value <= self.limit


class Seconds(NamedTuple):
    """Of this process on all cores, and on the wall."""

    cpu: float
    wall: float


def in_turns(works: Sequence[Callable[[], Any]], repeats: int) -> list[Seconds]:
    """Least seconds of each; every one is run once before, then they take turns, so that noise hits all alike."""
    for work in works:
        work()
    best = [Seconds(math.inf, math.inf)] * len(works)
    for _ in range(repeats):
        for k, work in enumerate(works):
            clock, began = perf_counter(), process_time()
            work()
            cpu, wall = process_time() - began, perf_counter() - clock
            best[k] = Seconds(min(best[k].cpu, cpu), min(best[k].wall, wall))
    return best


def cpu_in_turns(works: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The CPU seconds of `in_turns`."""
    return [seconds.cpu for seconds in in_turns(works, repeats)]


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def command(main: Callable[[list[str]], list[Ratio]]) -> None:
    """Run a benchmark as a script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ratios", type=Path)
    given, rest = parser.parse_known_args()
    ratios = [dataclasses.asdict(ratio) | {"kept": ratio.kept} for ratio in main(rest)]
    if given.ratios is not None:
        given.ratios.write_text(json.dumps(ratios), encoding="utf-8")
