"""The names of the planted faults, for processes that request them without an engine to import."""

LOADS = ("load skipped", "last block skipped", "one layer skipped", "two blocks swapped", "one element changed")
STORES = ("block copied after its reuse",)
RECURRENT = ("load skipped", "states skipped", "state of another boundary")
