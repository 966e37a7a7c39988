"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
