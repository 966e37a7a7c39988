"""What KV events say of a cluster that real engines use: every block that is there, and the token ids that made it.

A listener that has heard everything holds what a router would. Token ids are proved by what they are for: hashed behind
the block before them, they give the block's own hash.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcluster import EventSubscriber
from kvcluster.core import hashing
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from tests.vllm.e2e.run import House


@dataclass
class Told:
    """`blocks`: what is where, as far as it was told. `proved` and `false` count blocks by their token ids, `bare`
    those that came without."""

    blocks: set[tuple[Tier, BlockHash]] = field(default_factory=set)
    proved: int = 0
    false: int = 0
    bare: int = 0
    resets: list[str] = field(default_factory=list)

    @property
    def anywhere(self) -> set[BlockHash]:
        """Blocks, in whichever tier."""
        return {block for _, block in list(self.blocks)}

    def hear(self, event: KVEvent, root: BlockHash) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlocksRemoved):
            self.blocks.difference_update((event.tier, block) for block in event.hashes)
        elif isinstance(event, BlocksStored):
            self.blocks.update((event.tier, block) for block in event.hashes)
            if not event.tokens:
                self.bare += len(event.hashes)
            elif hashing.chain(event.parent or root, event.tokens, len(event.tokens) // len(event.hashes)) == [
                *event.hashes
            ]:
                self.proved += len(event.hashes)
            else:
                self.false += len(event.hashes)


@contextmanager
def listening(house: House) -> Iterator[Told]:
    """Hears everything of this house's cluster, on a thread."""
    told, over = Told(), threading.Event()
    namespaces: dict[str, NamespaceId] = {}

    def root(prefix: str) -> BlockHash:
        if prefix not in namespaces:
            known = [spec.namespace(Tenant("default")) for spec in house.namespaces()]
            namespaces.update({namespace.hex()[: len(prefix)]: namespace for namespace in known})
        return hashing.root(namespaces[prefix])

    def run() -> None:
        with EventSubscriber(*house.events) as subscriber:
            while not over.is_set():
                event = subscriber.next(0.2)
                if event is not None:
                    told.hear(event.event, root(event.namespace))
                    told.resets += [event.why] if event.why else []

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()
