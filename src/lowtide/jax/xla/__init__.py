"""What XLA makes of a program: dependencies in jaxprs, buffers, linear maps, and what is stored.

In: jaxprs and types. Out: primitives that the rest is built from, and bytes: estimated (`memory`), or found by
compiling (`compiled`). Imports the core only.
"""
