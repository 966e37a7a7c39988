"""Observe mode: what engines note of their requests, and what a cluster would have given for them."""
