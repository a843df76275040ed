"""What XLA makes of a program: dependencies in jaxprs, buffers, linear maps, and the arrays that are stored.

In: jaxprs and types. Out: primitives that the other folders build on, and bytes: estimated (`memory`), or found by
compiling (`compiled`). Imports: the core.
"""
