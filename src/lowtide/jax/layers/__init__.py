"""Layers: a row of functions, or a single one, whose tapes are made in a rerun in the backward.

In: layers and their input. Out: a chain (`costs`), a plan that holds in the compiled program (`plans`), and a program
of nested reruns (`nested`, `rerun`). Imports: the core, `xla` and `compare`.
"""
