"""Engine integrations: one package per engine, each of which converts that engine's KV into pages and back.

Only the demo imports an engine package, and importing one requires that engine to be installed. Each package keeps the
differences between its engine's releases in its `compat.py`.
"""
