"""Prefill on one server, decode on another: what the first says in its answer, and what the second waits for.

A proxy asks the first with `{"do_remote_decode": true}` in `kv_transfer_params` and `max_tokens` 1. That answers when
the prompt's blocks are committed, or a bounded time has passed, and says how many there are. The proxy hands what it
says to the second server, which loads them: by their content, as any other, so that it needs neither the first server's
address nor its life. It only knows that it is worth a short wait where fewer are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash

PAUSE_NS = 20_000_000
"""Between two lookups of a request whose blocks are promised and not there yet."""


def is_asked(params: Mapping[str, Any]) -> bool:
    """Will another server go on from this request?"""
    return bool(params.get("do_remote_decode"))


def promise(chain: list[BlockHash], blocks: int) -> dict[str, Any]:
    """What the answer says: so many leading blocks of the prompt were stored."""
    tip = chain[blocks - 1].hex() if blocks else ""
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvcluster": {"blocks": blocks, "tip": tip}}


def promised(params: Mapping[str, Any]) -> int:
    """How many leading blocks another server says are there; 0 where it says nothing that makes sense."""
    told = params.get("kvcluster")
    blocks = told.get("blocks") if isinstance(told, Mapping) and params.get("do_remote_prefill") else 0
    return blocks if type(blocks) is int and 0 <= blocks <= limits.BLOCKS_PER_CALL else 0
