"""Loops: `scan`, `for_loop` and their checkpointed forms.

In: a step function, a carry, inputs, an option. Out: the plain loop's results and gradients within a budget. `probe`
measures the first steps, the core plans, `engine` plays the plan; for both, `runner` runs and tapes steps, and
`pullback` takes gradients through each piece of tape. Imports: the core, `memory`, `state` and `lean`.
"""
