"""What an engine holds: `connect`, the Client and what its calls return. Nothing here imports torch until blocks of
tensors are given to it."""

from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.client.results import BlockExplanation, Loaded, Lookup, Pinned, Stored
from kvcluster.client.ticket import Ticket
from kvcluster.client.transfer import Transfer
from kvcluster.client.zero_copy import BorrowedBlocks

__all__ = [
    "BlockExplanation",
    "BorrowedBlocks",
    "Client",
    "Loaded",
    "Lookup",
    "Pinned",
    "Stored",
    "Ticket",
    "Transfer",
    "connect",
]
