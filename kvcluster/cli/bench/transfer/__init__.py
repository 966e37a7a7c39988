"""Benchmarks transfers of pages: every path that moves them, against the machine's limits and against other systems.

`baselines` measures what the machine can do, `transported` moves pages through one transport, `end_to_end` makes the
calls that an engine makes, and each file `*_driver.py` of a folder drives a peer. Every path has the same four methods
(`party`) and runs in its own processes; `interleave` lets them take turns, `thresholds` judges the figures, `table` and
`picture` show them.
"""
