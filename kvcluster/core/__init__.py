"""Decisions. Pure: message + now -> effects; no clock, no I/O, no torch, no ray; deterministic."""
