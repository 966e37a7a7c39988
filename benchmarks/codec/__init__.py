"""`python -m benchmarks codec`: measures how fast pages are encoded and decoded, and the error of the result."""
