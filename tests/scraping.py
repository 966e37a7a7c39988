"""Reads the metrics that a process serves."""

from __future__ import annotations

from urllib.request import urlopen


def scraped(port: int) -> dict[str, str]:
    """Returns each sample that a process of this machine serves, by its name and labels. The process must be ready."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        found = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
        assert answer.read() == b"ok\n"
    return found
