"""Benchmarks transfers of pages: every path that moves them, against the machine's limits and against other systems.

`baselines` measures what the machine can do, `transported` moves pages through one transport, `end_to_end` makes the
calls that an engine makes, and each file `*_driver.py` of a folder drives a peer. Every path has the same methods
(`worker.Path`) and runs in worker processes; `interleave` runs the rounds, `thresholds` judges the figures, and `table`
shows them.
"""
