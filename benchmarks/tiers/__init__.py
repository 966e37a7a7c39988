"""`python -m benchmarks tiers`: measures an encoded tier on a real cluster: loads from it, and stores while pages are
demoted to it."""
