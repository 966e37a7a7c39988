"""Policy: which shards are asked, for how long a silent one is waited for, and what the end of an exchange means.

Pure, and one object of a client: it knows no clock, no thread and no socket. `now` is nanoseconds of one monotonic
clock; callers that share a policy bring a lock. Each exchange with a shard needs a permit, and names it once when it
ends, so that the circuit breaker of that incarnation (breaker.py) learns from it:

    answered    whatever the shard said, a refusal too, shows that it lives
    failed      no answer, or none in time
    gave_up     its user broke off, which says nothing of the shard

What a load does about pages that did not come is load_plan.py with retry.py; about a store, store_plan.py. Both ask
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcluster.client.breaker import Breaker, BreakerState, PermitNumber
from kvcluster.core.messages import Refused, RefusedKind, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transport.base import Cancelled, PathLost, RefusedByShard, Unavailable

SILENT_SHARE = 4
"""A shard that sends nothing for this part of a load's time is silent: early enough to read it all from another."""

ASKING_SHARE = 4
"""Asking where else blocks lie takes this part of the time left at most: what has come must still be told in time."""


@dataclass(frozen=True, slots=True)
class Permit:
    """To ask this incarnation once."""

    shard: ShardAddress
    number: PermitNumber


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The same shard is to be asked once more: over another path, or `reattached`, since it had forgotten the namespace
    as after many others."""

    reattached: bool


class ShardPolicy:
    """Of one client. A newer epoch of a shard takes the place of an older one, and never the other way round."""

    def __init__(self, *, breaker_failures: int, breaker_ms: int) -> None:
        self._failures = breaker_failures
        self._open_ns = breaker_ms * 1_000_000
        self._known: dict[str, tuple[ShardAddress, Breaker]] = {}

    def permit(self, shard: ShardAddress, now: int) -> Permit | Miss:
        """A permit to ask this shard once, or the miss that not asking it amounts to."""
        known, breaker = self._known.get(shard.shard, (None, None))
        if known is not None and known.epoch > shard.epoch:  # of an old ticket
            return restarted(shard)
        if breaker is None or known != shard:
            breaker = Breaker(failures=self._failures, open_ns=self._open_ns)
            self._known[shard.shard] = shard, breaker
        number = breaker.ask(now)
        if isinstance(number, Miss):
            return Miss(number.reason, f"{shard.shard} {number.detail}")
        return Permit(shard, number)

    def answered(self, permit: Permit) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            breaker.succeeded(permit.number)

    def failed(self, permit: Permit, why: Miss, now: int) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            breaker.failed(permit.number, why, now)

    def gave_up(self, permit: Permit) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            breaker.gave_up(permit.number)

    def ended(
        self, permit: Permit, error: BaseException | None, now: int, *, reattached: bool = False
    ) -> BaseException | Miss | AskAgain | None:
        """Takes note of how an exchange ended: by its answer, or by `error`.

        Returns None where it was answered; AskAgain where it is to be asked once more, for a forgotten namespace unless
        it was `reattached` already; a Miss where the cluster is to blame; and an exception where its caller is, or a
        programming error.
        """
        if error is None:
            self.answered(permit)
            return None
        if isinstance(error, RefusedByShard):
            self.answered(permit)
            return refusal(error.refused, permit.shard, reattached=reattached)
        if isinstance(error, PathLost):
            self.gave_up(permit)
            return AskAgain(reattached)
        if isinstance(error, Unavailable) and not isinstance(error, Cancelled):
            self.failed(permit, error.miss, now)
            return error.miss
        self.gave_up(permit)
        return error.miss if isinstance(error, Cancelled) else error

    def serves(self, shard: ShardAddress) -> bool:
        """Is it asked without reserve? False of an incarnation that was never asked, and of one on probation."""
        breaker = self._breaker(shard)
        return breaker is not None and breaker.state is BreakerState.CLOSED

    def status(self, now: int) -> dict[str, dict[str, Any]]:
        """Shard -> its breaker's state, the failures in a row, and for how long it will not be asked."""
        return {
            name: {
                "state": breaker.state.value,
                "failures": breaker.failures,
                "open_ms": breaker.open_for(now) // 1_000_000,
            }
            for name, (_, breaker) in self._known.items()
        }

    def _breaker(self, shard: ShardAddress) -> Breaker | None:
        known, breaker = self._known.get(shard.shard, (None, None))
        return breaker if known == shard else None


def refusal(refused: Refused, shard: ShardAddress, *, reattached: bool) -> Exception | Miss | AskAgain:
    """What a refusal is to the caller of the exchange; see ShardPolicy.ended."""
    if refused.kind is RefusedKind.STALE:
        return restarted(shard)
    if refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
        if not reattached:
            return AskAgain(reattached=True)
        return Miss(MissReason.SHARD_LOST, f"{shard.shard} forgets the namespace: {refused.detail}")
    return (LimitError if refused.kind is RefusedKind.LIMIT else CallerError)(refused.detail)


def restarted(shard: ShardAddress) -> Miss:
    """Of pages of an incarnation that is over."""
    return Miss(MissReason.SHARD_LOST, f"{shard.shard} has restarted")
