"""`kvcluster tenants`: what each tenant has beside what its quota grants it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, coordinator, read_status
from kvcluster.cli.text_page import TableCell, TableColumn, TextPage, Tone, print_figures
from kvcluster.config import size_text

_DESCRIPTION = """
Lists what each tenant has beside what its quota grants it (server.quota_file): bytes by tier, pins, open sequences,
registered engines, and the rates of a server. Bytes of a tier are those of all shards, without replicas, which are
charged to no tenant. An operator's token lists all tenants, any other its own. It changes nothing.

"floor" is what is not evicted for other tenants, and "limit" the most that a tenant may have; a tier without a floor
has its part of coordinator.tenant_floor. What has neither, and is 0, is left out; --json has all of it.
"""

_FULL = 0.95
"""From this share of a limit on, its use is coloured."""


def add(commands: Any) -> None:
    """Adds the command."""
    tenants = commands.add_parser(
        "tenants",
        help="list what tenants have beside their quotas",
        description=_DESCRIPTION,
        examples=["kvcluster tenants", "kvcluster tenants --token-from ops.token --json | jq '.tenants[0]'"],
    )
    tenants.add_argument("--json", action="store_true", help="print the tenants as a JSON object")
    add_coordinator_args(tenants)
    tenants.set_defaults(run=_run)


def add_tenants(page: TextPage, listing: dict[str, Any]) -> None:
    """Adds some rows for each tenant, as `client.status.tenant_dict` returns them, and the warnings about quotas."""
    for sentence in listing["warnings"]:
        page.say(sentence, label="quotas: ", tone=Tone.WARNING)
    rows = [row for tenant in listing["tenants"] for row in _rows(tenant)]
    if not rows:
        page.say("no tenant has stored anything, and none has a quota")
        return
    numbers = (TableColumn(name, right=True) for name in ("used", "floor", "limit"))
    page.table([TableColumn("tenant"), TableColumn("of"), *numbers], rows)


def _rows(tenant: dict[str, Any]) -> Iterator[list[str | TableCell]]:
    name = tenant["tenant"]
    for row in _figures(tenant):
        yield [name, *row]
        name = ""


def _figures(tenant: dict[str, Any]) -> Iterator[list[str | TableCell]]:
    for tier, use in tenant["tiers"].items():
        yield [tier, _used(use["used_bytes"], use["limit_bytes"]), _size(use["floor_bytes"]), _size(use["limit_bytes"])]
    pinned, most = tenant["pinned_bytes"], tenant["most_pinned_bytes"]
    if pinned or most is not None:
        yield ["pinned", _used(pinned, most), "", _size(most)]
    for what in ("sequences", "engines"):
        held, most = tenant[what], tenant[f"most_{what}"]
        if held or most is not None:
            full = most is not None and held >= most
            limit = "" if most is None else f"{most:,}"
            yield [what, TableCell(f"{held:,}", Tone.WARNING if full else None), "", limit]
    if tenant["requests_per_second"] is not None:
        yield ["requests", "", "", f"{tenant['requests_per_second']:,g}/s"]
    if tenant["bytes_per_second"] is not None:
        yield ["bytes", "", "", f"{size_text(tenant['bytes_per_second'])}/s"]


def _used(nbytes: int, limit: int | None) -> TableCell:
    full = limit is not None and nbytes >= _FULL * limit
    return TableCell(size_text(nbytes), Tone.WARNING if full else None)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size_text(nbytes)


def _run(options: argparse.Namespace) -> int:
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        status = read_status(port, ANSWER_MS)
    listing = {"tenants": status["tenants"], "warnings": status["warnings"]}
    print_figures(listing, add_tenants, as_json=options.json)
    return 0
