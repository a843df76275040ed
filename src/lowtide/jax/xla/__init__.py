"""What XLA makes of a program: dependencies in jaxprs, buffers, linear maps, and estimates of what is stored.

In: jaxprs and types. Out: bytes, and primitives that the rest is built from; `cache` remembers the bytes of what was
compiled. Imports the core only.
"""
