"""Which replicas a request is better sent to: pure, and ignorant of Ray, of the coordinator and of time.

It is told on which hosts the prompt's leading blocks lie, and where the candidates run. What a replica reads from its
own host costs a copy, and what it computed itself it may still have; so those are preferred on whose host most of the
prefix lies. They are preferred, never required: the caller puts Serve's own choice behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Stretch:
    """`blocks` consecutive blocks of a prompt, and the host of each page that makes up one of them. A host is named
    more than once where it has more than one page of a block, as with tensor parallel ranks."""

    blocks: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica that may be chosen. `ongoing`: requests that it works on, None where that is not known."""

    name: str
    host: str
    ongoing: int | None = None


def preferred(
    stretches: Sequence[Stretch], candidates: Sequence[ReplicaCandidate], *, min_blocks: int, ahead: int
) -> tuple[str, ...]:
    """Names of the candidates on the host that holds most of the prefix, of several hosts where they hold as much.

    Nothing where no candidate's host holds `min_blocks` of it, or where each that does works on more than `ahead`
    requests beyond the least busy candidate: one host must not have to compute what others would have time for.
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
    """Blocks on each host. A block whose pages lie on several counts in parts."""
    held: dict[str, Fraction] = {}
    for stretch in stretches:
        for host in stretch.hosts:
            held[host] = held.get(host, Fraction(0)) + Fraction(stretch.blocks, len(stretch.hosts))
    return held
