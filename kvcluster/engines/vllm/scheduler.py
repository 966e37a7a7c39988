"""The scheduler's side of the connector: what to load for a request, and which blocks to store after which step.

It never waits and moves no bytes. For every running request it keeps the hash chain, the block table as the engine
reported it, and how far the chain is known to be in the cluster. Three rules keep stored and loaded KV correct:

    - A block is stored once the step that fills it has run over KV that is known to be good. A step with a load in its
      forward pass may have run over KV that did not arrive, on this rank or another. So while such a step is
      outstanding nothing new is stored, and afterwards only tokens that the engine still counts as computed.
    - A step lists every block that it gives to a new owner, so that stores which still read the block stop first.
    - A request whose load failed is not looked up again: it computes.

How many tokens of a prompt are loaded, and whether within a forward pass, is decided in matched_tokens.py; what is
stored after a step in store_planner.py; the loads under way are in request_state.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.kv_hints as kv_hints
import kvcluster.engines.vllm.pd_disagg as handover
from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.engines.vllm.matched_tokens import PrefixMatcher
from kvcluster.engines.vllm.registration import Adapters, Registration
from kvcluster.engines.vllm.request_state import LoadsInFlight, RequestState
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.stats import Stats
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, LoadReport, Step, StepReport, StoreOrder
from kvcluster.engines.vllm.store_planner import StorePlanner
from kvcluster.engines.vllm.weight_versions import WeightVersions
from kvcluster.errors import KVClusterError

_LAYERWISE_SLACK = 10
"""A load within a forward pass may take this multiple of `layerwise_ms`, since all requests of the pass wait for it."""

_LEAST_LAYERWISE_MS = 200


@dataclass(frozen=True, slots=True)
class EngineShape:
    """An engine of `ranks` ranks with `blocks` blocks each, and whether it `stores` and `loads`: by its role."""

    blocks: int
    ranks: int
    stores: bool = True
    loads: bool = True


class SchedulerSide:
    """The scheduler's side of one engine. Every method is called by the engine's scheduler, and returns at once."""

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: compat.Layout,
        registration: Registration,
        adapters: Adapters,
        engine: EngineShape,
        *,
        forget: Callable[[set[int]], object] = lambda blocks: None,
        empty_own_cache: Callable[[Collection[str]], bool] = lambda ended: False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._registration = registration
        self._adapters = adapters
        self._stores = engine.stores
        self._loads = engine.loads
        self._forget = forget
        self._clock = clock
        self._engine = os.urandom(16)
        self._matcher = PrefixMatcher(settings, layout)
        self._requests: dict[str, RequestState] = {}
        self._new_loads: list[LoadOrder] = []
        self._in_flight = LoadsInFlight(engine.ranks)
        self._hints: dict[str, kv_hints.HintAnswers] = {}  # by request that carries some
        self._ended: list[str] = []
        self._held: list[str] = []
        self._kept: set[str] = set()  # ended requests whose blocks the engine keeps for their stores
        self._step = 0
        self._planner = StorePlanner(layout, self._in_flight, ranks=engine.ranks, engine_blocks=engine.blocks)
        self.stats = Stats()
        self._versions = WeightVersions(
            registration,
            stop=lambda: self.reset(ready=not registration.run and empty_own_cache(self._kept)),
            empty_own_cache=lambda: empty_own_cache(self._kept),
            log=registration.log,
        )

    # --------------------------------------------------------------------------------------- before a request runs

    def matched(self, of_engine: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens that can be loaded behind the `local_tokens` that the engine has (None while
        that is not known), and whether they are loaded beside the forward passes."""
        if (hints := compat.kv_hints(of_engine)) is not None and of_engine.request_id not in self._hints:
            self._hints[of_engine.request_id] = answers = kv_hints.answer(hints)
            self.stats.answered(answers)
        if not local_tokens:  # a request that has blocks of the engine's own cache would keep them
            self._versions.use_waiting()
        tokens, beside = self._matched(of_engine, local_tokens)
        if tokens is not None and self._shares_a_load(of_engine, local_tokens):
            return None, False
        return tokens, beside

    def _matched(self, of_engine: Any, local_tokens: int) -> tuple[int | None, bool]:
        request = self._request(of_engine)
        if request is None:
            return 0, False
        self._lose_blocks(request)
        request.local_tokens = local_tokens
        if request.load_failed or not self._loads or not compat.reads_cache(of_engine):
            return 0, False
        return self._matcher.match(request, self._clock())

    def _shares_a_load(self, of_engine: Any, local_tokens: int) -> bool:
        """Whether the engine's own cache gives this request blocks that another request is about to load within the
        pass being scheduled. If those do not arrive, the engine would let this request continue from them before they
        are computed; so it must wait for the next pass."""
        within = self._in_flight.hashes_within()
        if not within or not local_tokens:
            return False
        request, blocks = self._requests.get(of_engine.request_id), local_tokens // self._layout.block_tokens
        if request is None:
            return True
        try:
            request.grow(blocks)
        except KVClusterError:  # its hashes are not known, so it waits
            return True
        return not within.isdisjoint(request.chain[:blocks])

    def _request(self, of_engine: Any) -> RequestState | None:
        """Returns the state of a request; None if it neither loads nor stores. A request that starts before its
        adapter's hash or the cluster is known runs without the cluster to its end, so that all its blocks belong to one
        namespace."""
        known, client = self._requests.get(of_engine.request_id), self._registration.client
        if known is not None:
            if known.client is not client:  # its hashes are of another namespace than the engine's current one
                known.private = known.load_failed = True
            return known
        adapter = self._adapters.get(*compat.adapter(of_engine))
        if client is None or adapter is None or compat.is_private(of_engine):
            return None
        if self._registration.run and compat.has_media(of_engine):  # the engine may have encoded them with old weights
            return None
        known = RequestState(
            of_engine, client, adapter, self._layout.block_tokens, self._engine, self._registration.reader
        )
        known.preemptions = compat.preemptions(of_engine)
        self._requests[of_engine.request_id] = known
        return known

    def allocated(self, of_engine: Any, table: BlockIds, tokens: int) -> None:
        """Orders the load of the matched tokens into the allocated blocks; `tokens` is 0 if the engine loads none."""
        request = self._requests.get(of_engine.request_id)
        if request is None or request.loading is not None:
            return
        answer = request.lookup.result if request.lookup is not None else None
        if not tokens or answer is None or answer.ticket is None:
            request.end_lookup()
            return
        ticket, first = answer.ticket, request.local_tokens // self._layout.block_tokens
        assert first * self._layout.block_tokens + tokens == ticket.blocks * self._layout.block_tokens
        deadline_ms = self._settings.load_ms
        if request.layerwise:
            slack_ms = max(_LEAST_LAYERWISE_MS, _LAYERWISE_SLACK * self._settings.layerwise_ms)
            deadline_ms = min(deadline_ms, slack_ms)
        request.loading = LoadOrder(
            request=of_engine.request_id,
            adapter=request.adapter,
            ticket=bytes(ticket),
            first=first,
            into=tuple(tuple(of_group[first : ticket.blocks]) for of_group in table),
            layerwise=request.layerwise,
            deadline_ms=deadline_ms,
            of_another=answer.of_another,
        )
        request.table = [list(of_group) for of_group in table]
        request.stored = max(request.stored, answer.own_blocks)
        request.states_stored = max(request.states_stored, answer.own_blocks)
        request.loss = max(request.loss, ticket.loss)
        self._new_loads.append(request.loading)
        self._in_flight.add(request.loading, tuple(request.chain[first : ticket.blocks]))

    # ----------------------------------------------------------------------------------------------- with each step

    def step(self, output: Any) -> Step:
        """Returns the orders for the step that the engine has just scheduled."""
        self._step += 1
        now = self._clock()
        self._matcher.lookups.tend(now)
        for name in compat.preempted(output):
            if (lost := self._requests.get(name)) is not None:
                self._lose_blocks(lost)
        loads, self._new_loads = tuple(self._new_loads), []
        within = any(load.layerwise for load in loads)
        if within:
            self._in_flight.steps.add(self._step)
        scheduled = list(compat.scheduled(output))
        if not within:
            self._matcher.prefill.began(self._step, sum(one.tokens for one in scheduled), now)
        loaded_into = [block for load in loads for of_group in load.into for block in of_group]
        written = [*loaded_into, *self._computed_into(scheduled), *compat.copied_into(output)]
        client = self._registration.client
        chains, stores, handed_over = self._store_orders(scheduled, client, compat.boundary_states(output))
        ended, self._ended = tuple(self._ended), []
        held, self._held = tuple(self._held), []
        return Step(
            number=self._step,
            weights=client.spec.weights if client is not None else self._registration.wanted,
            chains=tuple(chains),
            loads=loads,
            stores=tuple(stores),
            written=tuple(block for block in written if block != compat.NULL_BLOCK),
            gone=ended,
            held=held,
            handed_over=tuple(handed_over),
        )

    def _computed_into(self, scheduled: Sequence[compat.Scheduled]) -> list[int]:
        """Returns the engine's blocks that a step writes. It does not write computed blocks, which may be shared."""
        blocks: list[int] = []
        for one in scheduled:
            if one.new_blocks is not None:
                computed = one.computed // self._layout.block_tokens if one.replaces else 0
                blocks += [block for of_group in one.new_blocks for block in of_group[computed:]]
        return blocks

    def _store_orders(
        self,
        scheduled: Sequence[compat.Scheduled],
        client: Client | None,
        states: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> tuple[list[tuple[str, int, tuple[BlockHash, ...]]], list[StoreOrder], list[str]]:
        """Returns what a step stores: additions to hash chains, the store orders, and the requests that another server
        continues after this step."""
        may_store = self._stores and self._matcher.lookups.healthy and client is not None and not client.read_only
        chains: list[tuple[str, int, tuple[BlockHash, ...]]] = []
        stores: list[StoreOrder] = []
        handed_over: list[str] = []
        for one in scheduled:
            request = self._requests.get(one.request)
            if request is None:
                continue
            request.note(one)
            if self._adapters.get(*compat.adapter(request.of_engine)) is None:  # of several paths since it began
                request.private = True
            if not may_store or request.private or request.client is not client:
                continue
            planned = (
                self._planner.plan(request, one),
                self._planner.plan_state(request, one, states.get(one.request, ())),
            )
            if any(planned):
                chains.append((one.request, request.sent, tuple(request.chain[request.sent :])))
                request.sent = len(request.chain)
                stores += filter(None, planned)
            if request.hands_over(one):
                handed_over.append(one.request)
        return chains, stores, handed_over

    def reported(self, report: StepReport) -> None:
        """Handles the workers' report on the last step, merged from all ranks."""
        now = self._clock()
        self._matcher.prefill.ended(report.step, now)
        self._in_flight.end_steps(report.step)
        for name, load in report.loads.items():
            self._loaded(name, load, now)
        if not self._in_flight.steps:
            self._in_flight.ended_tables.clear()
        for number, ranks in report.drained.items():
            drained = self._planner.drain(number, ranks)
            if drained is not None and drained in self._requests:
                self._requests[drained].orders.discard(number)
        self.stats.reported(report)
        if report.off:  # a rank can move nothing any more, so nothing is asked for
            self._loads = self._stores = False

    def _loaded(self, name: str, load: LoadReport, now: int) -> None:
        ended = self._in_flight.report(name, load)
        if ended is None:
            return
        order, hashes, load = ended
        self._matcher.bandwidth.record(load.rank_bytes, load.took_ns, now)
        self.stats.loaded(load)
        wanted = order.first + len(order.into[0])
        arrived = load.blocks if self._layout.may_fail_in_part or load.blocks == wanted else order.first
        if load.loss > Loss.EXACT:
            self._planner.lossy.add(hashes[: arrived - order.first], load.loss)
        if arrived < wanted and order.layerwise:
            self._distrust(order, set(order.into[0][arrived - order.first :]))
        request = self._requests.get(name)
        if request is None or request.loading is not order:
            return
        request.loaded(arrived, load.nbytes, load.loss)
        request.end_lookup()
        if arrived < wanted:
            request.load_failed = True
            request.miss = load.miss
            request.stored = min(request.stored, arrived)
            request.states_stored = min(request.states_stored, arrived)

    def _distrust(self, failed: LoadOrder, blocks: set[int]) -> None:
        """Handles blocks that a layerwise load did not fill: the request that failed to load them computes them. Other
        requests that have them in their table, through the engine's own cache, store nothing more: whether their KV is
        right depends on the order in which the engine recomputes. The engine's cache evicts these blocks and all that
        was computed over them, because the request that recomputes them may end before it has done so."""
        tables = list(self._in_flight.ended_tables)
        for request in self._requests.values():
            if request.has(blocks):
                request.private = request.private or request.of_engine.request_id != failed.request
                tables.append(request.table[0])
        wrong = set(blocks)
        for table in tables:
            first = next((at for at, block in enumerate(table) if block in blocks), len(table))
            wrong.update(table[first:])
        self._forget(wrong)

    # ------------------------------------------------------------------------------------------------- at its end

    def finished(self, of_engine: Any) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request. Returns whether its blocks are still read, and the `kv_transfer_params` of its answer."""
        name = of_engine.request_id
        request, hints = self._requests.pop(name, None), self._hints.pop(name, None)
        if request is None:
            return False, {
                "kvcluster": {"hints": hints.plain()}
            } if hints is not None and self._settings.report else None
        request.end_lookup()
        self._ended.append(name)
        if request.has(self._in_flight.in_doubt()):
            self._in_flight.ended_tables.append(request.table[0])
        # The engine itself keeps the blocks of a load in progress.
        hold = bool(request.orders) and request.loading is None
        if hold:
            self._held.append(name)
            self._kept.add(name)
        return hold, self._answer(request, hints)

    def _answer(self, request: RequestState, hints: kv_hints.HintAnswers | None) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of a request's answer; None if it has none."""
        of_hints = {} if hints is None else {"hints": hints.plain()}
        report = {"kvcluster": request.report() | of_hints} if self._settings.report else None
        if not handover.is_asked(compat.transfer_params(request.of_engine)):
            return report
        stored = request.states_stored if self._layout.state_groups else request.stored
        blocks = min(stored, request.of_engine.num_prompt_tokens // self._layout.block_tokens)
        blocks = 0 if request.private else min(blocks, len(request.chain), request.shared_blocks)
        promise = handover.promise(request.chain, blocks)
        if report is not None:
            promise["kvcluster"] |= report["kvcluster"]
        return promise

    def _lose_blocks(self, request: RequestState) -> None:
        """Resets a request that was preempted. Called in a step and before a lookup, whichever comes first."""
        preemptions = compat.preemptions(request.of_engine)
        if request.preemptions < preemptions:
            request.preemptions = preemptions
            request.lose_blocks()
            request.end_lookup()

    # --------------------------------------------------------------------------------------------- the whole engine

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine still keeps blocks of ended requests, which will be freed."""
        return bool(self._kept)

    def blocks_released(self, names: Collection[str]) -> None:
        """Records that the workers no longer read the blocks of these requests, so that the engine frees them."""
        self._kept.difference_update(names)

    def reset(self, *, ready: bool = False) -> None:
        """Stops sharing KV: the engine's weights may have changed. `ready` as in Registration.withdraw."""
        self._versions.stopped()
        self._registration.withdraw(ready=ready)
        for request in self._requests.values():
            request.end_lookup()
            request.private = request.load_failed = True
        self._planner.lossy.clear()

    def before_rpc(self, method: object) -> None:
        """Stops sharing if the call that the workers are about to carry out may change the weights."""
        self._versions.before_rpc(method)

    def weight_version_set(self, version: object) -> None:
        """Shares under this version of the weights of the engine's run, if its settings name one."""
        self._versions.set(version)

    def close(self) -> None:
        for request in self._requests.values():
            request.end_lookup()
        self._matcher.lookups.close()
        self._registration.close()
