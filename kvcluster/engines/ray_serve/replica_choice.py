"""Chooses the replicas that a request should go to: pure functions that know nothing of Ray, the coordinator or time.

The input is the hosts that hold the prompt's leading blocks, and the hosts of the candidate replicas. Loading from its
own host costs a replica one copy, and blocks that it computed itself may still be in its own cache; so replicas on the
host that holds most of the prefix are preferred. They are never required: the caller appends Serve's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Stretch:
    """`blocks` consecutive blocks of a prompt, and the host of each page that makes up one of them. A host that holds
    several pages of a block, as with tensor parallel ranks, is named once per page."""

    blocks: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica that may be chosen. `ongoing` is the number of its ongoing requests, None if that is not known."""

    name: str
    host: str
    ongoing: int | None = None


def preferred(
    stretches: Sequence[Stretch], candidates: Sequence[ReplicaCandidate], *, min_blocks: int, ahead: int
) -> tuple[str, ...]:
    """Returns the names of the candidates on the host that holds most of the prefix; on several hosts if they tie.

    Omits candidates that have over `ahead` more ongoing requests than the least busy candidate, so that one host is not
    overloaded while others are idle. Returns () if none is left, or if no candidate's host holds `min_blocks` blocks.
    """
    held = held_by_host(stretches)
    most = max((held.get(candidate.host, Fraction(0)) for candidate in candidates), default=Fraction(0))
    if most < max(1, min_blocks):
        return ()
    least = min(candidate.ongoing or 0 for candidate in candidates)
    return tuple(
        candidate.name
        for candidate in candidates
        if held.get(candidate.host) == most and (candidate.ongoing or 0) <= least + ahead
    )


def held_by_host(stretches: Sequence[Stretch]) -> dict[str, Fraction]:
    """Returns the number of blocks on each host. A block with pages on several hosts counts as a fraction on each."""
    held: dict[str, Fraction] = {}
    for stretch in stretches:
        for host in stretch.hosts:
            held[host] = held.get(host, Fraction(0)) + Fraction(stretch.blocks, len(stretch.hosts))
    return held
