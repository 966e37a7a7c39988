"""Burns CPU and touches nothing else: `python -m tests.attacks.burner SHARE` takes SHARE of one core until it is ended.

It is what an attack is compared with: the same CPU, spent by a process that talks to no cluster.
"""

from __future__ import annotations

import sys
import threading
import time

_PERIOD_S = 0.02


def main() -> None:
    share, pause = min(1.0, float(sys.argv[1])), threading.Event()
    while True:
        began = time.monotonic()
        while time.monotonic() - began < share * _PERIOD_S:
            pass
        pause.wait(max(0.0, began + _PERIOD_S - time.monotonic()))


if __name__ == "__main__":
    main()
