"""Packages of others whose import warns; what they warn of is theirs."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import norse.torch as norse

__all__ = ["norse"]
