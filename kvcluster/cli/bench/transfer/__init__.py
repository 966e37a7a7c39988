"""Transfers of pages: every path that moves them, beside what bounds it and beside what others offer.

`floors` is what the machine can do, `transported` moves pages through one transport, `whole` is what an engine calls,
and each file `*_driver.py` of a folder drives a peer. Every path has the same four methods (`party`) and runs in
processes of its own; `turns` has them take turns, `goals` judges the figures, `table` and `picture` show them.
"""
