"""A user's own function, found by its name and planned.

In come `module:name` or `path/to/file.py:name` and options as text; out goes a plan.

    find.py        what that names
    planning.py    what that is (a loop, layers, a step, a plan, a chain), and its plan
    inputs.py      "float32[64,80]": an input of that dtype and shape
    frameworks.py  torch or jax, by what the values are

It may import the front ends, and imports one only when it is known which is meant.
"""

from lowtide.targets.planning import plan_target

__all__ = ["plan_target"]
