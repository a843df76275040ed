"""Interface: what both front ends share, and what knows no framework.

In: what users write. Out: the option of a loop, checked (`options`), progress bars (`progress`), what a comparison of
gradients found (`comparison`), and the cache for what was learned of functions (`cache`). Imports the core only.
"""
