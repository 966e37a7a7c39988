"""`python -m kvcluster`: the command line, where the program `kvcluster` is not on the PATH."""

from __future__ import annotations

import sys

from kvcluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
