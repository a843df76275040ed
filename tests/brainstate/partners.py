"""brainstate and its units, without types: those that they have do not fit how they are used."""

from __future__ import annotations

from typing import Any

import brainstate as _brainstate
import brainunit as _brainunit

brainstate: Any = _brainstate
transform: Any = _brainstate.transform
u: Any = _brainunit
