"""Loads and stores of blocks between the memory of an engine and the shards: plans and their executors, memory layouts,
and connections to the shards and the coordinator. No Ray."""
