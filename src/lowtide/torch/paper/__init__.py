"""Paper: the memory and time that a step would need, from tensors that have shapes and no values.

In: modules, tensors, and devices that need not be present. Out: fake tensors, results of operations on them, seconds of
operations. Imports: the core and `state`.
"""
