"""`kvcluster demo`: the command that runs the demo (cli/demo/)."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.extras import needs


def add(commands: Any) -> None:
    """Adds the command."""
    demo = commands.add_parser(
        "demo", help="show two engine replicas share a prefix on this machine", allow_abbrev=False
    )
    demo.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    with needs("cluster,transformers", "ray", "rich", "torch", "transformers"):
        from kvcluster.cli import demo
    return demo.run(["--json"] if options.json else [])
