"""Pins: protecting the cached prefix of a prompt from eviction, and ending that."""

from __future__ import annotations

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.results import Pinned
from kvcluster.core.messages import BlocksPinned, PinBlocks, UnpinBlocks
from kvcluster.core.spec import KVSpec
from kvcluster.transport.base import Deadline, Unavailable


def ask_to_pin(
    control: CoordinatorClient, spec: KVSpec, question: PinBlocks | UnpinBlocks, deadline: Deadline
) -> Pinned:
    """Returns how many leading blocks are pinned, or no longer pinned; none, and the miss, if the coordinator does not
    answer."""
    try:
        pinned = control.ask(BlocksPinned, spec, question, deadline)
    except Unavailable as trouble:
        return Pinned(0, 0, trouble.miss)
    return Pinned(pinned.blocks * spec.block_tokens, pinned.blocks)
