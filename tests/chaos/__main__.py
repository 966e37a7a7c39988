"""The long form: `python -m tests.chaos --minutes 20 --seed 1 [--json FILE]`. Ends with status 1 where anything is
wrong that must not be, a call was late, or a goal was missed."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import signal
import sys
import time
from pathlib import Path

from tests.chaos.faults import schedule
from tests.chaos.run import Run


def main() -> int:
    """Runs for so many minutes and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Faults on a real cluster under load.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report there too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left then either
    with Run(options.seed, functools.partial(print, flush=True)) as run:
        give_up = time.monotonic() + options.minutes * 60
        try:
            run.inflict(itertools.takewhile(lambda _: time.monotonic() < give_up, schedule(options.seed, run.stage)))
            run.drain()
        except AssertionError as error:  # what was seen until then is told nevertheless
            run.report.wrong.append(f"the run could not go on: {error}")
        report = run.finish()
    print(report.table())
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return int(bool(report.wrong or report.late or report.missed_goals()))


if __name__ == "__main__":
    sys.exit(main())
