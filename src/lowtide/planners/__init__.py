"""Planners: pure functions from a chain and a knob to a plan. Importing them lets plans be read from JSON."""

from lowtide.planners import blocks, hetero, online, revolve, sweep, tiers, uniform

__all__ = ["blocks", "hetero", "online", "revolve", "sweep", "tiers", "uniform"]
