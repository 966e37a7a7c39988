"""Loads and stores of blocks, between the memory of an engine and the shards: plans, what carries them out, layouts of
memory, and connections to shards and the coordinator. No Ray."""
