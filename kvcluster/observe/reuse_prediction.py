"""What a cluster would have given engines that ran without one, predicted from what they observed.

An engine in observe mode notes each request: its block hashes, how many leading blocks its own cache had, and when
their KV was computed (observe/trace_file.py). `predict` replays the requests of several engines in order of time over
one LRU stack (chain_stack.py): a lookup finds the blocks that were computed before it, by any engine, and a block is
used whenever a request that has it is computed. So a request that computes what another one is still computing finds
nothing, as in a real cluster. `outcome` then applies a capacity and the break-even rule of the connectors
(breakeven.py).

Not in the model: the fraction of a second until a stored block can be found, failed loads, pins, copies, and the
eviction policy's preferences beyond LRU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.observe.chain_stack import ChainStack, DistanceRun


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
