"""kvcluster: a distributed KV cache for LLM inference.

    spec = kvcluster.KVSpec.uniform(model="llama-3-8b", weights="sha256:...", num_layers=32, num_kv_heads=8,
                                    head_dim=128, dtype="bfloat16", block_tokens=16)
    with kvcluster.connect("127.0.0.1:7070", spec) as client:
        client.store(token_ids, blocks)
        tokens = client.load(token_ids, out)

Importing this, and every name in it, needs neither torch nor ray: tensors bring torch, a call of `local` brings ray, an
`EventSubscriber` brings ZMQ. A call that needs a package which is not installed raises KVClusterError, and names the
extra to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcluster.release import __version__ as __version__

if TYPE_CHECKING:
    from kvcluster import errors
    from kvcluster.actors.local import LocalCluster, local
    from kvcluster.client import (
        AttendPlanner,
        BlockExplanation,
        BorrowedBlocks,
        Client,
        FetchWhatFits,
        Loaded,
        Lookup,
        Prompt,
        Sequence,
        SequenceBatch,
        ShipAbsent,
        SpanChoice,
        SpanFacts,
        StepFacts,
        Stored,
        Ticket,
        Transfer,
        WindowPolicy,
        connect,
    )
    from kvcluster.client.events import EventSubscriber
    from kvcluster.config import ClientConfig
    from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane, window
    from kvcluster.core.miss import Loss, Miss, MissReason
    from kvcluster.core.spec import KVSpec
    from kvcluster.errors import KVClusterError
    from kvcluster.transfers.layouts import Buffers, Dense, Layers, Paged


_WHERE = {
    "kvcluster.actors.local": ("LocalCluster", "local"),
    "kvcluster.client": (
        "AttendPlanner",
        "BlockExplanation",
        "BorrowedBlocks",
        "Client",
        "Loaded",
        "Lookup",
        "Prompt",
        "Sequence",
        "SequenceBatch",
        "FetchWhatFits",
        "ShipAbsent",
        "SpanChoice",
        "SpanFacts",
        "StepFacts",
        "Stored",
        "Ticket",
        "Transfer",
        "WindowPolicy",
        "connect",
    ),
    "kvcluster.client.events": ("EventSubscriber",),
    "kvcluster.transfers.layouts": ("Buffers", "Dense", "Layers", "Paged"),
    "kvcluster.config": ("ClientConfig",),
    "kvcluster.core.groups": ("LAST", "PREFIX", "Group", "Part", "Plane", "chunk", "window"),
    "kvcluster.core.miss": ("Loss", "Miss", "MissReason"),
    "kvcluster.core.spec": ("KVSpec",),
    "kvcluster.errors": ("KVClusterError",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "LAST",
    "PREFIX",
    "AttendPlanner",
    "BlockExplanation",
    "BorrowedBlocks",
    "Buffers",
    "Client",
    "ClientConfig",
    "Dense",
    "EventSubscriber",
    "FetchWhatFits",
    "Group",
    "KVClusterError",
    "KVSpec",
    "Layers",
    "Loaded",
    "LocalCluster",
    "Lookup",
    "Loss",
    "Miss",
    "MissReason",
    "Paged",
    "Part",
    "Plane",
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
    "chunk",
    "connect",
    "errors",
    "local",
    "window",
]


_REMOVED = {
    "CostPlanner": "attend loads what is absent; FetchWhatFits and ShipAbsent send queries to shards",
}
"""Names of release 0.2, and what to use instead. Until 0.4."""


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first used: a shard's process wants no client, a client no ray."""
    if name == "errors":
        return importlib.import_module("kvcluster.errors")
    if name in _REMOVED:
        raise AttributeError(f"kvcluster.{name} is not there any more: {_REMOVED[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvcluster' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
