"""State: what a rerun must find as the first run found it, and how the two are compared.

In: functions, modules and nested values. Out: what they reach and keep hidden, random numbers, settings, captured
tensors, and the differences between two runs. Imports the core and `memory`.
"""
