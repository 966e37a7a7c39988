"""Searches for a wrong byte that a load accepts: flipped bits of stored pages, and sources that change while they are
copied. `make integrity INTEGRITY_ARGS="--flips 100000 --seed 2"`."""

from __future__ import annotations

import argparse
import sys

from tests.integrity.flips import flip_bits
from tests.integrity.scribbler import scribble

_SHOWN = 20
"""Wrong loads that are printed one by one."""


def main() -> int:
    """Returns 1 if a load accepted a wrong byte or refused a right one, or if no copy met the scribbler."""
    parser = argparse.ArgumentParser(prog="python -m tests.integrity", description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000, help="bits to flip in stored pages (default 10,000)")
    parser.add_argument("--tries", type=int, default=10_000, help="copies of a changing source (default 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (default 0)")
    asked = parser.parse_args()
    flipped = flip_bits(asked.flips, asked.seed)
    print(flipped.table(), flush=True)
    for wrong in flipped.wrong[:_SHOWN]:
        print(f"wrong: {wrong}")
    scribbled = scribble(asked.tries, asked.seed)
    print(f"\n{scribbled.table()}")
    for kind in scribbled.idle:
        print(f"no copy met the scribbler: {kind.direction.value} {kind.layout} {kind.executor}")
    wrong_records, raced = sum(scribbled.wrong.values()), sum(scribbled.raced.values())
    print(
        f"{sum(flipped.found.values()):,} of {asked.flips:,} flips reported exactly, {len(flipped.wrong):,} wrong; "
        f"{sum(scribbled.tries.values()):,} tries, {raced:,} records raced, {wrong_records:,} wrong"
    )
    return int(bool(flipped.wrong or wrong_records or scribbled.idle))


if __name__ == "__main__":
    sys.exit(main())
