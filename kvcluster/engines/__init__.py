"""Leaves: one package an engine, each turning that engine's own KV into pages and back.

Nothing imports an engine but the demo, and importing one needs that engine installed. What differs between an
engine's releases stays in its `compat.py`.
"""
