"""Chains and disks described on the command line: by sizes and speeds, or by a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.chain import Chain, Disk, StepCost, Working
from lowtide.errors import InputError
from lowtide.sizes import parse_size


def equal_chain(
    steps: int | None,
    state: str | None,
    tape: str | None,
    working: str | None,
    forward: float | None,
    backward: float | None,
) -> Chain:
    """A chain of steps that all cost the same."""
    missing = [f"--{name}" for name, value in (("steps", steps), ("state", state), ("tape", tape)) if value is None]
    if steps is None or state is None or tape is None:
        raise InputError(
            f"{', '.join(missing)} missing; give --steps, --state and --tape, or --chain FILE, or a function of your "
            "own, for example\n"
            "  lowtide plan --steps 1000000 --state 64KiB --tape 320KiB --budget 64MiB\n"
            "  lowtide plan mymodule:make --budget 64MiB"
        )
    used = _size_or_zero(working or 0, "working")
    step = StepCost(
        parse_size(state, "state"),
        parse_size(tape, "tape"),
        1.0 if forward is None else forward,
        2.0 if backward is None else backward,
        working=Working(used, used, used),
    )
    return Chain.equal(step, steps)


def read_chain(path: Path) -> Chain:
    """The chain of the steps that a file lists."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--chain {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--chain {path} is not JSON: {error}") from error
    known = {"name", "state", "tape", "forward", "backward", "cotangent"}
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"--chain {path}: give a list of steps, each an object with state and tape")
    for k, row in enumerate(rows):
        if not {"state", "tape"} <= row.keys() <= known:
            raise InputError(
                f"--chain {path}, step {k}: has {sorted(row)}; needs state and tape, knows {sorted(known)}"
            )
    names = [row.pop("name", f"step {k:,}") for k, row in enumerate(rows)]
    return Chain.of([_step(row) for row in rows], names)


def read_disk(write: str | None, read: str | None) -> Disk | None:
    """The disk, if its speed in bytes per second is given; by default it reads as fast as it writes."""
    if write is None:
        if read is not None:
            raise InputError("--disk-read needs --disk-write")
        return None
    writing = parse_size(write, "disk-write")
    return Disk(1 / writing, 1 / (parse_size(read, "disk-read") if read is not None else writing))


def _step(row: dict[str, Any]) -> StepCost:
    sizes: dict[str, Any] = {
        name: _size_or_zero(row[name], name) for name in ("state", "tape", "cotangent") if name in row
    }
    return StepCost(**(row | sizes))


def _size_or_zero(size: int | str, name: str) -> int:
    """A size that may be 0; `StepCost` refuses it where it may not."""
    return 0 if size in (0, "0") and size is not False else parse_size(size, name)
