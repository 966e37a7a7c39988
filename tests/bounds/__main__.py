"""Measures the worst of every message and prints the table of bounds: `python -m tests.bounds [--write]`.

`--write` puts it into docs/bounds.md, between its marks. Ends with status 1 if a message took more memory than
table.MEMORY allows, or was answered as a failure of the server.
"""

from __future__ import annotations

import argparse
import sys

from tests.bounds import table
from tests.bounds.measure import bench
from tests.bounds.messages import MESSAGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bounds", description="The worst of every message.")
    parser.add_argument("--only", nargs="+", choices=MESSAGES, default=list(MESSAGES), help="these messages alone")
    parser.add_argument("--write", action="store_true", help="write the table into docs/bounds.md")
    parser.add_argument("--ways", action="store_true", help="print how each way of a message was answered")
    options = parser.parse_args()
    figures = []
    with bench() as measuring:
        for name in options.only:
            figures.append(measuring.measure(name))
            print(table.row(figures[-1]), flush=True)
            if options.ways:
                for way, answer in figures[-1].answers.items():
                    print(f"    {way}: {answer}")
    broken = [failure for each in figures for failure in table.failures(each)]
    print("\n".join(broken))
    if options.write:
        table.write(figures)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
