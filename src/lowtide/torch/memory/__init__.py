"""Memory: what is alive, where, and since when.

In: operations as torch runs them. Out: storages, when each was made and freed, and bytes at the worst moment
(`tracker`), receipts of whole runs (`recording`). `cache` remembers what calls were found to be, for as long as their
modules are alive. Imports the core only.
"""
