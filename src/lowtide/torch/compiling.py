"""`torch.compile`, once for each function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_compiled: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of `f`, made on the first call and kept as long as `f` lives."""
    if f not in _compiled:
        _compiled[f] = torch.compile(f)
    return _compiled[f]
