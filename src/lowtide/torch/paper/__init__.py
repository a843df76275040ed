"""Paper: what a step would hold and take, with tensors that have shapes and no values.

In: modules, tensors, and devices that need not be here. Out: fake tensors, results of operations on them, seconds of
operations. Imports the core, `memory` and `state`.
"""
