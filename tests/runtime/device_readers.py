"""A reader on the device of each shard's pool, of which only the shard hears."""

from __future__ import annotations

from itertools import groupby

from kvcluster.core.ids import HOLDER_BYTES, Attempt, Holder, Tenant
from kvcluster.core.messages import Pin, Unpin
from kvcluster.core.tiers import INGEST
from kvcluster.replay.core_stepper import build_request
from kvcluster.testing import MemoryCluster

DEFAULT = Tenant("default")
READER = Attempt(Holder(bytes(HOLDER_BYTES)), 1)


def read_on_device(cluster: MemoryCluster, tenant: Tenant = DEFAULT) -> None:
    """Reads what lies in RAM, so that it is promoted to the pools."""
    for host in cluster.shards.values():
        lying = [page for page in list(host.core.pool.ready()) if page.tier is INGEST]
        for space, pages in groupby(lying, lambda page: page.space):
            keys = tuple(page.key for page in pages)
            pin = Pin(READER, host.core.epoch, keys, on_device=True)
            host.ask(build_request(pin, tenant, space), 10.0)
            host.ask(build_request(Unpin(READER), tenant), 10.0)
