"""`python -m benchmarks sequences`: measures what a sequence costs as it grows to a million tokens."""
