"""The program `kvcluster`, and `python -m kvcluster`."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line, and returns its exit status. An interrupt while it is still being imported ends it as one
    that comes later does."""
    try:
        from kvcluster.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("kvcluster: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
