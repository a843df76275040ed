"""Deliberately wrong variants of the library: does each make a test fail? `make mutants` runs them all.

In: `table.py`, the variants, each with the tests that are to catch it. Out: a line for each, and exit code 1 if one
lives. `test_table.py` makes sure that every variant still fits the code and names tests that exist.
"""
