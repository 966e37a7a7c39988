"""kvcluster: a distributed KV cache for LLM inference.

    spec = kvcluster.KVSpec.uniform(model="llama-3-8b", weights="sha256:...", num_layers=32, num_kv_heads=8,
                                    head_dim=128, dtype="bfloat16", block_tokens=16)
    with kvcluster.connect("127.0.0.1:7070", spec) as client:
        client.store(token_ids, blocks)
        tokens = client.load(token_ids, out)

Importing this needs neither torch nor ray: tensors bring torch, `local` brings ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcluster import errors
from kvcluster.client import BlockExplanation, Client, Loaded, Lookup, Stored, Ticket, Transfer, connect
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import LAST, PREFIX, Group, KVSpec, Part, Plane, window
from kvcluster.errors import KVClusterError

if TYPE_CHECKING:
    from kvcluster.actors.local import local
    from kvcluster.client.memory import Buffers, Dense, Paged

__version__ = "0.1.0"

_LATER = {
    "local": "kvcluster.actors.local",
    "Buffers": "kvcluster.client.memory",
    "Dense": "kvcluster.client.memory",
    "Paged": "kvcluster.client.memory",
}

__all__ = [
    "LAST",
    "PREFIX",
    "BlockExplanation",
    "Buffers",
    "Client",
    "Dense",
    "Group",
    "KVClusterError",
    "KVSpec",
    "Loaded",
    "Lookup",
    "Loss",
    "Miss",
    "MissReason",
    "Paged",
    "Part",
    "Plane",
    "Stored",
    "Ticket",
    "Transfer",
    "connect",
    "errors",
    "local",
    "window",
]


def __getattr__(name: str) -> Any:
    """What needs torch or ray is imported when it is first used."""
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'kvcluster' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
