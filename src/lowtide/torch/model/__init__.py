"""Models: a whole training step within a memory peak.

In: a model, a batch, a loss, an optimizer. Out: its blocks (`blocks`), their costs in each form (`costs`, `step`), a
plan (`planning`), and the same model with the plan applied (`apply`). Imports: the core and every other folder of
`lowtide.torch` except `loops`.
"""
