"""The parts of a client in the order in which they are closed: by its `close`, or when it is collected without that.

No part refers to the client, and none of their threads keeps it alive.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from kvcluster.errors import KVClusterError
from kvcluster.sequences.opener import SequenceOpener
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.tickets import Tickets
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transfers.zero_copy import Borrower
from kvcluster.transport.forks import OwnProcess
from kvcluster.transport.thread_start import start_thread


class ClientParts(NamedTuple):
    """What is to be closed of one client."""

    sequences: SequenceOpener
    control: CoordinatorClient
    transfers: TransferQueue
    shards: ShardConnections
    borrower: Borrower
    tickets: Tickets

    def close(self) -> None:
        """Closes them. Questions and exchanges that may hang are ended before the threads that make them are waited
        for."""
        self.sequences.end()
        self.control.end_questions()
        self.transfers.close(self.shards.close)
        self.sequences.close()
        self.borrower.close()  # after the shards are closed, which ends calls that hang in asking a shard
        self.tickets.close()
        self.control.close()

    def close_with(self, client: object, process: OwnProcess) -> weakref.finalize[Any, Any]:
        """Has them closed when the client is collected, with a ResourceWarning, unless what is returned is detached."""
        unclosed = weakref.finalize(client, _abandon, process, self, repr(client))
        unclosed.atexit = False
        return unclosed


def _abandon(process: OwnProcess, parts: ClientParts, name: str) -> None:
    """Closes the parts on a thread of its own: the garbage collector calls this in any thread, perhaps in one that
    closing waits for, or one that holds a lock."""
    if process.forked:
        return
    with suppress(KVClusterError):  # without room for a thread they stay open
        start_thread(threading.Thread(target=parts.close, name="kvcluster-close", daemon=True))
    warnings.warn(f"{name} was not closed: close it, or open it by `with`", ResourceWarning, stacklevel=2)
