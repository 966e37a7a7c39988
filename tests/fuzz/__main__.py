"""Fuzzes parsers from the command line: `make fuzz FUZZ_INPUTS=1000000`, or one input that was found."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.fuzzer import Finding, Fuzz, unspelt
from tests.fuzz.parsers import PARSERS


def main() -> int:
    """Returns 1 where a parser broke its contract."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--parser", action="append", choices=PARSERS, metavar="NAME", help="only this one; repeatable")
    options.add_argument("--inputs", type=int, default=100_000, help="inputs a parser")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--input", type=unspelt, metavar="BYTES", help="only this input, as a finding spells it")
    asked = options.parse_args()
    broken = total = 0
    for name in asked.parser or PARSERS:
        fuzz = Fuzz(PARSERS[name], asked.seed)
        began = time.process_time()
        try:
            if asked.input is not None:
                print(f"{name}: {'accepted' if fuzz.check(asked.input) else 'refused'}")
                continue
            tally = fuzz.run(asked.inputs)
        except Finding as finding:
            broken += 1
            print(finding, flush=True)
            continue
        total += tally.inputs
        took = time.process_time() - began
        print(
            f"{name:34} {tally.inputs:>9,} inputs, {tally.accepted / tally.inputs:4.0%} accepted, "
            f"{tally.inputs / took:>9,.0f} a second of CPU, {tally.grown_objects:>+5} objects",
            flush=True,
        )
    print(f"{total:,} inputs, {broken} parsers broken")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
