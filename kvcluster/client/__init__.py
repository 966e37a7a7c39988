"""The client package that an engine uses: `connect`, the Client and the results of its calls. Nothing here imports
torch until the caller passes tensors."""

from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.sequences import (
    AttendPlanner,
    FetchWhatFits,
    Sequence,
    SequenceBatch,
    ShipAbsent,
    SpanChoice,
    SpanFacts,
    StepFacts,
    WindowPolicy,
)
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import (
    BlockExplanation,
    Loaded,
    Lookup,
    PinListing,
    Pinned,
    PinnedPrefix,
    Stored,
    Transfer,
)
from kvcluster.transfers.zero_copy import BorrowedBlocks

__all__ = [
    "AttendPlanner",
    "BlockExplanation",
    "BorrowedBlocks",
    "Client",
    "FetchWhatFits",
    "Loaded",
    "Lookup",
    "PinListing",
    "Pinned",
    "PinnedPrefix",
    "Prompt",
    "Sequence",
    "SequenceBatch",
    "ShipAbsent",
    "SpanChoice",
    "SpanFacts",
    "StepFacts",
    "Stored",
    "Ticket",
    "Transfer",
    "WindowPolicy",
    "connect",
]
