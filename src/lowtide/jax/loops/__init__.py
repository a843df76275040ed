"""Loops: `scan`, `for_loop` and their checkpointed forms.

In: a step function, a carry, inputs, an option. Out: `lax.scan`'s results and gradients in bounded memory. `step`
traces the step, `tape` finds what it saves and costs, `lowering` turns a plan into a program, and `nested_scans` makes
one for `base=` from nested scans. Imports: the core, `xla` and `compare`.
"""
