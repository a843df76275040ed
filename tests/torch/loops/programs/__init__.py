"""Programs as people write them, each with a loop over steps; `program.py` says what one is and how it is judged.

They are in files by what they are about. Those that use a package are written as its tutorials write them.
"""
