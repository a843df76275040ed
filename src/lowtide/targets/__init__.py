"""A user's own function, found by its name and planned.

    find.py        `module:name` or `path/to/file.py:name`: what it names
    planning.py    what that is (a loop, layers, a step, a plan, a chain), and its plan
    inputs.py      "float32[64,80]": something of that form
    frameworks.py  torch or jax, by what the values are

A front end is imported only once it is known which one is meant.
"""

from lowtide.targets.planning import plan_target

__all__ = ["plan_target"]
