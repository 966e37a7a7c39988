"""Measures the worst of every message, and of handshakes within TLS: `python -m tests.bounds [--write]`.

Prints the tables of bounds. `--write` puts them into docs/bounds.md, between their marks. Ends with status 1 if a
message took more memory than table.MEMORY allows, or was answered as a failure of the server, or if connections were
more than their port keeps.
"""

from __future__ import annotations

import argparse
import sys

from tests.bounds import handshakes, table
from tests.bounds.measure import bench
from tests.bounds.messages import MESSAGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bounds", description="The worst of every message.")
    parser.add_argument("--only", nargs="+", choices=MESSAGES, default=list(MESSAGES), help="these messages alone")
    parser.add_argument("--write", action="store_true", help="write the table into docs/bounds.md")
    parser.add_argument("--ways", action="store_true", help="print how each way of a message was answered")
    parser.add_argument("--handshakes", action="store_true", help="handshakes alone")
    options = parser.parse_args()
    broken = [] if options.handshakes else _messages(options)
    if options.handshakes or options.only == list(MESSAGES):
        broken += _handshakes(write=options.write)
    print("\n".join(broken))
    return int(bool(broken))


def _messages(options: argparse.Namespace) -> list[str]:
    """Measures messages. Returns what was too much."""
    figures = []
    with bench() as measuring:
        for name in options.only:
            figures.append(measuring.measure(name))
            print(table.row(figures[-1]), flush=True)
            if options.ways:
                for way, answer in figures[-1].answers.items():
                    print(f"    {way}: {answer}")
    if options.write:
        table.write(figures)
    return [failure for each in figures for failure in table.failures(each)]


def _handshakes(*, write: bool) -> list[str]:
    """Measures handshakes. Returns what was too much."""
    costs = []
    with bench(tls=True) as measuring:
        for port in handshakes.PORTS:
            costs += handshakes.measure(measuring, port)
            print("\n".join(cost.row() for cost in costs[-len(handshakes.WAYS) :]), flush=True)
    if write:
        handshakes.write(costs)
    return [failure for cost in costs for failure in cost.failures()]


if __name__ == "__main__":
    sys.exit(main())
