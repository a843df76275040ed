"""Planners: from a chain and an option to a plan.

In: the costs of a chain's steps and one option (a budget, a number of snapshots, a base, a peak, or none). Out: a
frozen schedule with its bill. `choose` picks the planner; there is a module for each, named after what it plans.
`frontier` plans for many budgets, and `block_text` describes a plan of blocks. Planners are pure: they measure nothing
and know no framework. Imports: the core below them (`chain`, `actions`, `plan`, `simulate`) and numpy; `cut` alone
imports scipy. Importing this package lets plans be read from JSON.
"""

from lowtide.planners import blocks, equal, online, revolve, sweep, tiers, unequal

__all__ = ["blocks", "equal", "online", "revolve", "sweep", "tiers", "unequal"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
