"""Models: a whole loss function within a peak.

In: a loss function and its parameters. Out: its blocks (`blocks`, `parts`), their costs in each form (`costs`), and a
plan whose compiled program stays within the peak (`search`, `program`). Imports: the core, `xla` and `layers`.
"""
