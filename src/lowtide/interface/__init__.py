"""What both front ends share of their faces: options that are checked, progress bars, comparisons of gradients.

In: what users write. Out: the option of a loop and its plan (`options`), bars that move (`progress`), and what a
comparison found (`comparison`). Imports the core, and knows no framework.
"""
