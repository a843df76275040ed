"""Planners: pure functions from a chain and an option to a plan. Importing them lets plans be read from JSON."""

from lowtide.planners import blocks, equal, online, revolve, sweep, tiers, unequal

__all__ = ["blocks", "equal", "online", "revolve", "sweep", "tiers", "unequal"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
