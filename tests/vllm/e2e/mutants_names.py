"""The names of the planted faults, for whoever orders them and has no engine to import."""

LOADS = ("load skipped", "last block skipped", "one layer skipped", "two blocks swapped", "one element changed")
STORES = ("block copied after its reuse",)
