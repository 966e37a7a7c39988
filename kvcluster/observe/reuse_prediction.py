"""What a cluster would have given engines that ran without one, predicted from what they observed.

An engine in observe mode notes each request: its block hashes, how many leading blocks its own cache had, and when
their KV was computed (observe/trace_file.py). `predict` replays the requests of several engines in order of time over
one LRU stack (ChainStack): a lookup finds the blocks that were computed before it, by any engine, and a block is used
whenever a request that has it is computed. So a request that computes what another one is still computing finds
nothing, as in a real cluster. `outcome` then applies a capacity and the break-even rule of the connectors
(breakeven.py).

Not in the model: the fraction of a second until a stored block can be found, failed loads, pins, copies, and the
eviction policy's preferences beyond LRU.

`ChainStack` computes the LRU stack distance of each block: how large a cache would have to be to still hold it. The
distance is the block's place in the order of last use, counted from 1. An LRU cache of n blocks holds exactly the
blocks of distance n or less, so one pass over a trace gives the hits of every capacity (Mattson, Gecsei, Slutz and
Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal, 1970). The blocks that were used more
recently than a given one are counted in a tree of partial sums (Fenwick, 1994), as Bennett and Kruskal (LRU stack
processing, 1975) did.

Blocks form chains. A chain is used as a whole, and its root counts as its most recently used block: a cache evicts
leaves before roots. So of the blocks that one use touched, those that no later use has touched are always the end of
its chain, and their distances are consecutive numbers. The tree therefore has a cell for each use and not for each
block, and a request costs as many steps in it as its chain has runs of blocks that were last used together, which are
few.

That holds where a hash always follows the same hashes. If two chains share a hash by accident, some distances are too
large, and nothing else goes wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec


class DistanceRun(NamedTuple):
    """`blocks` consecutive blocks of a chain; the first has the stack distance `nearest`, and each next one 1 more."""

    nearest: int
    blocks: int

    def within(self, capacity: int) -> int:
        """Returns how many of these blocks an LRU cache of `capacity` blocks holds: the leading ones."""
        return min(self.blocks, max(0, capacity - self.nearest + 1))

    def without(self, leading: int) -> DistanceRun:
        """Returns the run without its first `leading` blocks."""
        return DistanceRun(self.nearest + leading, self.blocks - leading)


class ChainStack:
    """The order of last use of all blocks seen so far. `uses`: how often `use` will be called at most."""

    def __init__(self, uses: int) -> None:
        self._last: dict[Hashable, int] = {}  # by block: the number of its last use, from 1
        self._sums = [0] * (uses + 1)  # a Fenwick tree: by use, how many blocks it was the last one of
        self._number = 0

    def __len__(self) -> int:
        """Returns how many different blocks have been used."""
        return len(self._last)

    def distances(self, chain: Iterable[Hashable]) -> list[DistanceRun]:
        """Returns the distances of the leading blocks of `chain`, up to the first block that was never used. They grow
        along the chain."""
        found: list[DistanceRun] = []
        reached = 0
        for last, same in groupby(map(self._last.get, chain)):
            if last is None:
                break
            blocks = sum(1 for _ in same)
            nearest = max(reached, len(self._last) - self._used_until(last)) + 1
            reached = nearest + blocks - 1
            found.append(DistanceRun(nearest, blocks))
        return found

    def use(self, chain: Sequence[Hashable]) -> None:
        """Makes the blocks of `chain` the most recently used ones, the first block first."""
        blocks = dict.fromkeys(chain, self._number + 1)
        if not blocks:
            return
        self._number += 1
        for last, same in groupby(map(self._last.get, blocks)):
            if last is not None:
                self._add(last, -sum(1 for _ in same))
        self._last.update(blocks)
        self._add(self._number, len(blocks))

    def _add(self, use: int, blocks: int) -> None:
        assert 1 <= use < len(self._sums), "the stack was made for fewer uses"
        while use < len(self._sums):
            self._sums[use] += blocks
            use += use & -use

    def _used_until(self, use: int) -> int:
        """Returns how many blocks were last used by `use` or before it."""
        blocks = 0
        while use:
            blocks += self._sums[use]
            use -= use & -use
        return blocks


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """One request of an engine, from its lookup until it ended or was preempted. Times are wall clock.

    `chain` are shortened block hashes. A lookup at `at_ns` asks for the first `asked` of them, of which the engine's
    own cache has `local`. From each time of `computed` on, so many leading blocks have KV that the engine would have
    stored. `prefill_tokens_per_s` is the engine's measured rate at the end, 0 while it is not known.
    """

    engine: str
    at_ns: int
    prompt_tokens: int
    asked: int
    local: int
    computed: tuple[tuple[int, int], ...]
    chain: Sequence[bytes]
    prefill_tokens_per_s: int = 0


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """A request, and the stack distances of the blocks that it would find behind those of its engine's own cache."""

    request: ObservedRequest
    runs: tuple[DistanceRun, ...]

    def found(self, capacity: int | None) -> int:
        """Returns how many blocks a cluster of `capacity` blocks (None: without limit) would have for it."""
        return sum(run.blocks if capacity is None else run.within(capacity) for run in self.runs)


def predict(requests: Sequence[ObservedRequest]) -> tuple[list[PredictedRequest], int]:
    """Returns the predictions in the order of `requests`, and the number of different blocks that were computed.

    All requests must be of one namespace.
    """
    lookups = [(one.at_ns, 1, number, 0) for number, one in enumerate(requests)]
    uses = [(at, 0, number, blocks) for number, one in enumerate(requests) for at, blocks in one.computed]
    stack = ChainStack(len(uses))
    predicted: dict[int, PredictedRequest] = {}
    for _, is_lookup, number, blocks in sorted(lookups + uses):
        request = requests[number]
        if is_lookup:
            runs = stack.distances(request.chain[: request.asked])
            predicted[number] = PredictedRequest(request, tuple(_behind(runs, request.local)))
        else:
            stack.use(request.chain[:blocks])
    return [predicted[number] for number in range(len(requests))], len(stack)


def _behind(runs: Sequence[DistanceRun], local: int) -> Iterator[DistanceRun]:
    for run in runs:
        if run.blocks > local:
            yield run.without(local)
        local = max(0, local - run.blocks)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What one request would have loaded, and the prefill time less the time of the load."""

    loaded_tokens: int
    saved_ns: int


@dataclass(frozen=True, slots=True)
class PredictedOutcome:
    """Sums over all requests. Of the `prompt_tokens`, the engines' own caches had `local_tokens`; a cluster would have
    had `found_tokens` more, of which loads would have paid for `loaded_tokens`. `requests` are in the order given."""

    prompt_tokens: int
    local_tokens: int
    found_tokens: int
    loaded_tokens: int
    saved_ns: int
    prefill_ns: int
    requests: tuple[RequestOutcome, ...]


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What decides whether a load pays: the spec, the parts of one rank, the link, and a prefill rate that stands in
    where none was measured (0: then every load is made, and saves nothing)."""

    spec: KVSpec
    parts: Sequence[Part | None]
    link: LinkRate
    prefill_tokens_per_s: int = 0

    def rate(self, request: ObservedRequest) -> int:
        """Returns the prefill rate of the request's engine in tokens a second; 0 if it is not known."""
        return request.prefill_tokens_per_s or self.prefill_tokens_per_s


def outcome(predicted: Sequence[PredictedRequest], cost: LoadCost, capacity: int | None) -> PredictedOutcome:
    """Returns what a cluster of `capacity` blocks (None: without limit) would have given these requests."""
    step = cost.spec.block_tokens
    evens: dict[int, Breakeven] = {}
    found = prefill_ns = 0
    outcomes: list[RequestOutcome] = []
    for one in predicted:
        rate = cost.rate(one.request)
        even = evens.setdefault(rate, Breakeven(cost.spec, cost.parts, rate or 1))
        tokens = one.found(capacity) * step
        found += tokens
        prefill_ns += even.prefill_ns(max(0, one.request.prompt_tokens - one.request.local * step)) if rate else 0
        outcomes.append(_outcome(even, cost.link, tokens, known=bool(rate)))
    return PredictedOutcome(
        prompt_tokens=sum(one.request.prompt_tokens for one in predicted),
        local_tokens=sum(one.request.local for one in predicted) * step,
        found_tokens=found,
        loaded_tokens=sum(one.loaded_tokens for one in outcomes),
        saved_ns=sum(one.saved_ns for one in outcomes),
        prefill_ns=prefill_ns,
        requests=tuple(outcomes),
    )


def _outcome(even: Breakeven, link: LinkRate, tokens: int, *, known: bool) -> RequestOutcome:
    if not tokens or (known and not even.pays(tokens, link)):
        return RequestOutcome(0, 0)
    saved_ns = even.prefill_ns(tokens) - link.load_ns(even.nbytes(tokens)) if known else 0
    return RequestOutcome(tokens, saved_ns)
