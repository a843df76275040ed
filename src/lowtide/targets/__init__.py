"""Finds a user's own function by its name, and plans it.

In: `module:name` or `path/to/file.py:name`, and options as text. Out: a plan.

    find.py        imports what the name stands for
    planning.py    decides what that is (a loop, layers, a step, a plan, a chain), and plans it
    inputs.py      "float32[64,80]": an input of that dtype and shape
    frameworks.py  torch or jax, recognised by the values

It may import the front ends, and imports one only once it is known which of them is needed.
"""

from lowtide.targets.planning import plan_target

__all__ = ["plan_target"]
