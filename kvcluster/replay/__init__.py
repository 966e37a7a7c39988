"""The real core on simulated time, without bytes, sockets or threads: what `kvcluster bench trace` replays requests
with, and what tests and the simulator step."""
