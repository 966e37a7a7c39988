"""`python -m benchmarks attend`: measures attention over the pages of sequences, beside what else computes the same."""
