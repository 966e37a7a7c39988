"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Parses a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
