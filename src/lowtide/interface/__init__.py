"""Interface: what both front ends share and what knows no framework.

In: what users write. Out: the option of a loop, checked (`options`), progress bars (`progress`), the result of a
comparison of gradients (`comparison`), and the cache for what was learned about functions (`cache`). Imports: the core.
"""
