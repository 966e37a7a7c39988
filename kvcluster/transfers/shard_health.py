"""Policy: which shards are asked, how long a load waits for a silent one, and what the end of an exchange means.

Pure, one object per client: it reads no clock and uses no thread and no socket. `now` is in nanoseconds of one
monotonic clock; callers that share a policy lock it themselves. Each exchange with a shard needs a permit, and names it
once when it ends, so that the circuit breaker of that incarnation (breaker.py) learns from it:

    answered    any answer, a refusal included, shows that the shard is alive
    failed      no answer, or none in time
    gave_up     the user cancelled the exchange, which shows nothing about the shard

load_plan.py with failover.py decides what a load does about pages that did not arrive, store_plan.py what a store does.
Both ask this policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcluster.core.messages import Refused, RefusedKind, ShardAddress
from kvcluster.core.miss import PURGING, Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transfers.breaker import LEAST_WAIT_NS, Breaker, BreakerState, PermitNumber
from kvcluster.transport.base import Cancelled, PathLost, RateLimited, RefusedByShard, Unavailable

SILENT_SHARE = 4
"""A shard that sends nothing for 1/4 of a load's time is silent: early enough to read everything from another shard."""

INCARNATIONS = 2
"""A shard that has restarted is asked at its new address, and for a while, by earlier tickets, at its old one."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission to ask this incarnation once, given at `now_ns`."""

    shard: ShardAddress
    number: PermitNumber
    now_ns: int


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The same shard should be asked once more: over another path, or `reattached`, because it no longer knew the
    namespace (a shard forgets one when many others are attached)."""

    reattached: bool


class ShardHealth:
    """The policy of one client. Each incarnation of a shard has a breaker; those of the last INCARNATIONS asked are
    kept.

    An incarnation of a lower epoch than another may be that of an old ticket, or the newest: epochs are wall-clock
    time, and a shard may restart on a node whose clock is behind. So both are asked, and each has its own breaker.
    """

    def __init__(self, *, breaker_failures: int, breaker_ms: int) -> None:
        self._failures = breaker_failures
        self._open_ns = breaker_ms * 1_000_000
        self._breakers: dict[str, dict[ShardAddress, Breaker]] = {}  # by shard and incarnation, the last asked last
        self.openings = 0  # how often a breaker has opened, failed probes included

    def permit(self, shard: ShardAddress, now: int) -> Permit | Miss:
        """Returns a permit to ask this shard once, or the miss to report for not asking it."""
        breakers = self._breakers.setdefault(shard.shard, {})
        breaker = breakers.pop(shard, None) or Breaker(failures=self._failures, open_ns=self._open_ns)
        breakers[shard] = breaker
        if len(breakers) > INCARNATIONS:
            del breakers[next(iter(breakers))]
        number = breaker.ask(now)
        if isinstance(number, Miss):
            return Miss(number.reason, f"{shard.shard} {number.detail}")
        return Permit(shard, number, now)

    def answered(self, permit: Permit) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            breaker.succeeded(permit.number)

    def failed(self, permit: Permit, why: Miss, now: int) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            waited_ns = now - permit.now_ns if why.reason is MissReason.DEADLINE else LEAST_WAIT_NS
            self.openings += breaker.failed(permit.number, why, now, waited_ns=waited_ns)

    def gave_up(self, permit: Permit) -> None:
        breaker = self._breaker(permit.shard)
        if breaker is not None:
            breaker.gave_up(permit.number)

    def ended(
        self, permit: Permit, error: BaseException | None, now: int, *, reattached: bool = False
    ) -> BaseException | Miss | AskAgain | None:
        """Records how an exchange ended: with an answer, or with `error`.

        Returns None if it was answered; AskAgain if the shard should be asked once more (for a forgotten namespace only
        unless `reattached`); a Miss if the cluster failed; and the exception if it is a mistake of the caller or a
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
            if error.miss.reason is PURGING.reason or isinstance(error, RateLimited):  # no fault of the shard
                self.answered(permit)
            else:
                self.failed(permit, error.miss, now)
            return error.miss
        self.gave_up(permit)
        return error.miss if isinstance(error, Cancelled) else error

    def serves(self, shard: ShardAddress) -> bool:
        """Whether its breaker is closed. False for an incarnation that was never asked."""
        breaker = self._breaker(shard)
        return breaker is not None and breaker.state is BreakerState.CLOSED

    def status(self, now: int) -> dict[str, dict[str, Any]]:
        """Returns by shard the breaker of the incarnation asked last: its state, the failures in a row, and for how
        long it will not be asked."""
        last = {name: next(reversed(breakers.values())) for name, breakers in self._breakers.items()}
        return {
            name: {
                "state": breaker.state.value,
                "failures": breaker.failures,
                "open_ms": breaker.open_for(now) // 1_000_000,
            }
            for name, breaker in last.items()
        }

    def _breaker(self, shard: ShardAddress) -> Breaker | None:
        return self._breakers.get(shard.shard, {}).get(shard)


def refusal(refused: Refused, shard: ShardAddress, *, reattached: bool) -> Exception | Miss | AskAgain:
    """Returns what a refusal means for the caller of the exchange, as ShardHealth.ended."""
    if refused.kind is RefusedKind.STALE:
        return restarted(shard)
    if refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
        if not reattached:
            return AskAgain(reattached=True)
        return Miss(MissReason.SHARD_LOST, f"{shard.shard} forgets the namespace: {refused.detail}")
    return (LimitError if refused.kind is RefusedKind.LIMIT else CallerError)(refused.detail)


def restarted(shard: ShardAddress) -> Miss:
    """Returns the miss for pages of an incarnation that has ended."""
    return Miss(MissReason.SHARD_LOST, f"{shard.shard} has restarted")
