"""What checkpoint-schedules' schedules cost: an oracle that knows nothing of this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it recommends numba
    import checkpoint_schedules


def peer_plain_runs(make: Callable[[Any], Any], length: int) -> int:
    """Plain runs of the schedule that `make` takes from the module; every step's taping run is not counted."""
    runs = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action in make(checkpoint_schedules):
            if isinstance(action, checkpoint_schedules.Forward):
                runs += action.n1 - action.n0
            if isinstance(action, checkpoint_schedules.EndReverse):
                break
    return runs - length
