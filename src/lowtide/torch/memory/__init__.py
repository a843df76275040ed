"""Memory: what is alive, where, and since when.

In: operations as torch runs them. Out: storages, when each was made and freed, and the bytes at the worst moment
(`tracker`), and receipts of whole runs (`recording`). Imports: the core.
"""
