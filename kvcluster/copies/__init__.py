"""Batches of copies between pages and blocks, and the executors that carry out and verify them."""
