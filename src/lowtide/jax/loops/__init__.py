"""Loops: `scan`, `for_loop` and their checkpointed forms.

In: a step function, a carry, inputs, an option. Out: `lax.scan`'s results and gradients in bounded memory. `step`
traces the step, `tape` says what it saves and costs, `lowering` makes a program of a plan, and `nested_scans` one of
scans in scans. Imports the core and `xla`.
"""
