"""Layers: layers that are called one after the other, within a budget.

In: layers and their input. Out: a chain (`costs`), a plan for it (`sequential`), and a run in nested checkpoint calls
(`nested`). Imports: the core, `memory`, `state`, `lean` and `checkpoint`.
"""
