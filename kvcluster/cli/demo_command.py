"""`kvcluster demo`: the command that runs the demo (cli/demo/)."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.extras import needs

_DESCRIPTION = """
Shows two engine replicas share the KV of a document through a real cluster that it starts on this machine and stops
again: how much faster the second one answers, that its answers are the same, that nothing is found under other weights,
and what the host tier adds. It takes about half a minute on two cores and downloads nothing: the model has random
weights. With DEMO_MODEL=FOLDER in the environment it takes a real model.

exit status: 0; 1 if the cache changed an answer, or if the checks could not have noticed that.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    demo = commands.add_parser(
        "demo",
        help="show two engine replicas share a prefix on this machine",
        description=_DESCRIPTION,
        examples=["kvcluster demo", "DEMO_MODEL=./llama kvcluster demo --json"],
    )
    demo.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    with needs("ray", "rich", "torch", "transformers"):
        from kvcluster.cli import demo
    return demo.run(["--json"] if options.json else [])
