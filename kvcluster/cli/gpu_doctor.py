"""`kvcluster doctor --gpu`: what this machine and installation have for KV in the memory of a GPU, as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcluster.cli.text_page import TableColumn, TextPage, print_figures
from kvcluster.config import size_text
from kvcluster.device.examine import examine


def run(*, as_json: bool) -> int:
    """Prints the findings. Returns the exit status: 0 if nothing is missing."""
    found = examine()
    print_figures(found, _add_findings, as_json=as_json)
    return 1 if found["missing"] else 0


def _add_findings(page: TextPage, found: Mapping[str, Any]) -> None:
    page.say(f"CUDA of the driver: {found['driver'] or 'none'}")
    for name in ("torch", "triton", "compiler"):
        page.say(f"{name}: {found[name] or 'none'}")
    page.say(f"compiled kernels: {found['cache'] or 'not kept, since no folder of this user can be written'}")
    if found["devices"]:
        page.say("")
        page.table(
            [TableColumn("device"), TableColumn("name"), TableColumn("memory"), TableColumn("multiprocessors")],
            [
                (each["uuid"], each["name"], size_text(each["memory_bytes"]), str(each["multiprocessors"]))
                for each in found["devices"]
            ],
        )
    page.say("")
    for sentence in found["missing"]:
        page.say(f"missing: {sentence}")
    if not found["missing"]:
        page.say("KV on these devices is served to clients with ClientConfig(device_staging_bytes=...).")
    page.say("No release of kvcluster has run with KV on a GPU: `make gpu` in a checkout tries it here.")
