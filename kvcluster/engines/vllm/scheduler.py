"""The scheduler's side of the connector: what to load for a request, and which blocks to store after which step.

It never waits and moves no bytes. For every request that runs it keeps the hash chain, the block table as the engine
told it, and how far the chain is known to be in the cluster. What is true of KV follows from three rules:

    - A block is stored once the step that fills it has run over KV that is known to be good. A step with a load in its
      forward pass may turn out to have run over KV that did not come, at this rank or at another; so while such a step
      is out, nothing is stored, and afterwards only what the engine still calls computed.
    - Whatever a step hands to a new owner is named in it, so that stores which still read it stop first.
    - A request whose load failed is not looked up again: it computes.

An engine with several block tables cannot take back a part of a load, only a whole request that waits for it; so its
loads go on beside the forward passes. With one table, a load that will be short goes on within one, layer by layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.pd_disagg as handover
from kvcluster.client.bandwidth import LearnedBandwidth
from kvcluster.client.client import Client
from kvcluster.client.ticket import Ticket
from kvcluster.core import limits
from kvcluster.core.breakeven import Breakeven
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import PREFIX
from kvcluster.engines.vllm.async_lookup import Ask, AsyncLookups
from kvcluster.engines.vllm.lossy_blocks import LossyBlocks
from kvcluster.engines.vllm.rates import PrefillRate
from kvcluster.engines.vllm.registration import Adapters, Registration
from kvcluster.engines.vllm.request_state import Loading, RequestState
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.stats import Stats
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, LoadReport, Step, StepReport, StoreOrder
from kvcluster.errors import KVClusterError

_LAYERWISE_SLACK = 10
"""A load within a forward pass may take so many times what was expected of it, since all others wait for it as well."""

_LEAST_LAYERWISE_MS = 200

_PENDING_NS = 100_000_000
"""So long a request waits at most for a block that somebody else is storing: most stores are over much sooner."""


class SchedulerSide:
    """Of one engine. Every method belongs to the engine's scheduler, and returns at once."""

    def __init__(
        self,
        settings: ConnectorSettings,
        layout: compat.Layout,
        registration: Registration,
        adapters: Adapters,
        *,
        engine_blocks: int,
        ranks: int,
        stores: bool = True,
        loads: bool = True,
        forget: Callable[[set[int]], object] = lambda blocks: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._registration = registration
        self._adapters = adapters
        self._ranks = ranks
        self._stores = stores
        self._loads = loads
        self._forget = forget
        self._clock = clock
        self._lookups = AsyncLookups(settings.lookup_ms * 1_000_000)
        self._link = LearnedBandwidth()
        self._prefill = PrefillRate(settings.prefill_tokens_per_s)
        self._requests: dict[str, RequestState] = {}
        self._new_loads: list[LoadOrder] = []
        self._loading: dict[str, Loading] = {}  # by request, whether it still lives or not
        self._ended_in_doubt: list[list[int]] = []
        self._gone: list[str] = []
        self._held: list[str] = []
        self._kept: set[str] = set()  # requests that ended, whose blocks the engine keeps for their stores
        self._step = 0
        self._loading_steps: set[int] = set()  # steps that are out with a load in their forward pass
        self._order = 0
        self._drained: dict[int, tuple[str, int]] = {}  # by store order, whose it is and how many ranks still read
        self._lossy = LossyBlocks(4 * engine_blocks)
        self._keeps_all = all(group.reuse == PREFIX for group in layout.groups)
        self.stats = Stats()

    # --------------------------------------------------------------------------------------- before a request runs

    def matched(self, of_engine: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded behind the `local_tokens` that the engine has; None while that is not known.
        The other value says whether they are loaded beside the forward passes."""
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
        if self._clock() < request.look_again_ns:
            return None, False
        ticket = self._look_up(request)
        if ticket is None:
            return (0 if request.lookup is None else None), False
        if self._comes_more(request, ticket):
            self._end_lookup(request)
            return None, False
        tokens = ticket.blocks * self._layout.block_tokens - local_tokens
        if tokens <= 0 or self._better_computed(request, tokens):
            self._end_lookup(request)
            return 0, False
        return tokens, not request.layerwise

    def _shares_a_load(self, of_engine: Any, local_tokens: int) -> bool:
        """Does the engine's own cache give it blocks that are only about to be loaded, within the pass that is being
        put together? If they do not come, the engine lets it go on from them before they are computed; so it is to
        wait for the next pass."""
        within = {name for load in self._loading.values() if load.order.layerwise for name in load.names}
        if not within or not local_tokens:
            return False
        request, blocks = self._requests.get(of_engine.request_id), local_tokens // self._layout.block_tokens
        mine = request.chain[:blocks] if request is not None else []
        return len(mine) < blocks or not within.isdisjoint(mine)

    def _request(self, of_engine: Any) -> RequestState | None:
        """The request as it is known here; None where it neither loads nor stores. What is not known in time, its
        adapter's content or the cluster, it goes without for good, so that its blocks are of one namespace."""
        known, client = self._requests.get(of_engine.request_id), self._registration.client
        if known is not None:
            if known.client is not client:  # its hashes are of another namespace than the engine's is now
                known.private = known.load_failed = True
            return known
        adapter = self._adapters.get(*compat.adapter(of_engine))
        if client is None or adapter is None or compat.is_private(of_engine):
            return None
        known = RequestState(of_engine, client, adapter, self._layout.block_tokens)
        known.preemptions = compat.preemptions(of_engine)
        self._requests[of_engine.request_id] = known
        return known

    def _look_up(self, request: RequestState) -> Ticket | None:
        """The ticket for a request; None where there is none yet (`request.lookup` stays) or will be none."""
        now = self._clock()
        if request.lookup is None:
            begun = self._lookups.begin(self._asker(request), now)
            if begun is None or isinstance(begun, Miss):
                request.miss = begun or Miss(MissReason.PENDING, "other lookups come first")
                return None
            request.lookup = begun
        answer = self._lookups.look(request.lookup, now)
        if answer is None:
            return None
        request.miss = answer.miss
        if answer.ticket is None:
            self._end_lookup(request)
            return None
        if len(answer.hashes) > len(request.chain):
            request.chain = list(answer.hashes)
        return answer.ticket

    def _comes_more(self, request: RequestState, ticket: Ticket) -> bool:
        """Is more than is found on its way, and worth the wait until it is looked for again? Another server has said
        so, or somebody is storing the next block at this moment; then others of the same prompt follow it closely."""
        asked = (request.of_engine.num_tokens - 1) // self._layout.block_tokens
        promised = min(handover.promised(compat.transfer_params(request.of_engine)), asked)
        if ticket.blocks < promised:
            patience_ns = self._settings.handover_ms * 1_000_000
        elif ticket.miss is not None and ticket.miss.reason is MissReason.PENDING:
            patience_ns = _PENDING_NS
        else:
            return False
        now = self._clock()
        request.comes_until_ns = request.comes_until_ns or now + patience_ns
        request.look_again_ns = now + handover.PAUSE_NS
        return now < request.comes_until_ns

    def _asker(self, request: RequestState) -> Ask:
        """The question of how far a request's tokens are cached. The last of them has to be computed in any case, or
        there is nothing to go on from; so a block that ends with it is not asked for."""
        blocks = min((request.of_engine.num_tokens - 1) // self._layout.block_tokens, limits.BLOCKS_PER_CALL)
        grow = request.grower(blocks, self._settings.lookup_ms)

        def ask() -> tuple[Client, Sequence[BlockHash], str]:
            return request.client, grow(), request.adapter

        return ask

    def _better_computed(self, request: RequestState, tokens: int) -> bool:
        """Is that faster than loading so many tokens? Where not, says in `request.layerwise` how to load them."""
        prefill = self._prefill.known()
        even = Breakeven(request.client.spec, self._layout.parts, prefill or 1)
        link = self._link.ask(even.nbytes(tokens), self._clock())
        request.layerwise = False
        if link is None:
            return False  # this load is to show it
        miss = None if prefill is None else even.miss(tokens, link)
        if miss is not None:
            request.miss = miss
            return True
        expected_ns = link.load_ns(even.nbytes(tokens))
        request.layerwise = self._layout.may_fail_in_part and expected_ns <= self._settings.layerwise_ms * 1_000_000
        return False

    def allocated(self, of_engine: Any, table: BlockIds, tokens: int) -> None:
        """The engine has room for the tokens that were matched, in these blocks; 0 where it takes none of them."""
        request = self._requests.get(of_engine.request_id)
        if request is None or request.loading is not None:
            return
        answer = request.lookup.result if request.lookup is not None else None
        if not tokens or answer is None or answer.ticket is None:
            self._end_lookup(request)
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
        )
        request.table = [list(of_group) for of_group in table]
        request.stored = max(request.stored, ticket.blocks)
        request.loss = max(request.loss, ticket.loss)
        self._new_loads.append(request.loading)
        names = tuple(request.chain[first : ticket.blocks])
        self._loading[of_engine.request_id] = Loading(request.loading, names)

    # ----------------------------------------------------------------------------------------------- with each step

    def step(self, output: Any) -> Step:
        """The orders of the step that the engine has just scheduled."""
        self._step += 1
        now = self._clock()
        self._lookups.tend(now)
        for name in compat.preempted(output):
            if (lost := self._requests.get(name)) is not None:
                self._lose_blocks(lost)
        loads, self._new_loads = tuple(self._new_loads), []
        within = any(load.layerwise for load in loads)
        if within:
            self._loading_steps.add(self._step)
        scheduled = list(compat.scheduled(output))
        if not within:
            self._prefill.began(self._step, sum(one.tokens for one in scheduled), now)
        loaded_into = [block for load in loads for of_group in load.into for block in of_group]
        client = self._registration.client
        chains, stores, handed_over = self._store_orders(scheduled, client)
        gone, self._gone = tuple(self._gone), []
        held, self._held = tuple(self._held), []
        return Step(
            number=self._step,
            weights=client.spec.weights if client is not None else "",
            chains=tuple(chains),
            loads=loads,
            stores=tuple(stores),
            written=tuple(b for b in loaded_into + self._computed_into(scheduled) if b != compat.NULL_BLOCK),
            gone=gone,
            held=held,
            handed_over=tuple(handed_over),
        )

    def _computed_into(self, scheduled: Sequence[compat.Scheduled]) -> list[int]:
        """Blocks of the engine that a step writes. What is computed already is shared with others, and not written."""
        blocks: list[int] = []
        for one in scheduled:
            if one.new_blocks is not None:
                computed = one.computed // self._layout.block_tokens if one.replaces else 0
                blocks += [block for of_group in one.new_blocks for block in of_group[computed:]]
        return blocks

    def _store_orders(
        self, scheduled: Sequence[compat.Scheduled], client: Client | None
    ) -> tuple[list[tuple[str, int, tuple[BlockHash, ...]]], list[StoreOrder], list[str]]:
        """What a step stores: additions to hash chains, the orders, and the requests that another server goes on with
        after this step."""
        may_store = self._stores and self._lookups.healthy
        chains: list[tuple[str, int, tuple[BlockHash, ...]]] = []
        stores: list[StoreOrder] = []
        handed_over: list[str] = []
        for one in scheduled:
            request = self._requests.get(one.request)
            if request is None:
                continue
            request.note(one)
            if not may_store or request.private or request.client is not client:
                continue
            store = self._store(request, one)
            if store is not None:
                chains.append((one.request, request.told, tuple(request.chain[request.told :])))
                request.told = len(request.chain)
                stores.append(store)
            if request.hands_over(one):
                handed_over.append(one.request)
        return chains, stores, handed_over

    def _store(self, request: RequestState, one: compat.Scheduled) -> StoreOrder | None:
        """What is to be stored of a request once this step is through."""
        of_engine, step = request.of_engine, self._layout.block_tokens
        tokens = one.computed + one.tokens
        if self._loading_steps:  # of this step or one before it nobody knows yet whether it ran over KV that came
            tokens = min(compat.validated_tokens(of_engine), one.computed)
            if request.loading is not None or request.has(self._in_doubt()):
                return None
        full = min(tokens, of_engine.num_tokens) // step
        full = min(full, limits.BLOCKS_PER_CALL, *(len(of_group) for of_group in request.table))
        first = request.stored
        if not self._keeps_all:  # what a window has left behind may be somebody else's by now
            first = max(first, compat.validated_tokens(of_engine) // step)
        new = request.storable(first, full)
        request.stored = max(request.stored, new.stop)
        if not new:
            return None
        if new.stop > len(request.chain):
            try:  # of what is not known at once it goes without: nobody waits here
                request.chain = request.grower(new.stop, deadline_ms=0)()
            except KVClusterError as error:
                request.private, request.miss = True, Miss(MissReason.SHARD_LOST, str(error))
                return None
        self._order += 1
        self._drained[self._order] = (of_engine.request_id, self._ranks)
        request.orders.add(self._order)
        return StoreOrder(
            number=self._order,
            request=of_engine.request_id,
            adapter=request.adapter,
            first=new.start,
            source=request.blocks(new),
            loss=self._loss(request, new.start),
            tokens=request.tokens(new),
        )

    def _loss(self, request: RequestState, first: int) -> Loss:
        """What KV computed over a request's prefix has lost; the engine's own cache may have given some of it."""
        before = request.chain[: max(first, request.local_tokens // self._layout.block_tokens)]
        request.loss = self._lossy.worst(before, request.loss)
        return request.loss

    def reported(self, report: StepReport) -> None:
        """What the workers say of the last step, from all ranks."""
        now = self._clock()
        self._prefill.ended(report.step, now)
        self._loading_steps -= {number for number in self._loading_steps if number <= report.step}
        for name, load in report.loads.items():
            self._loaded(name, load, now)
        if not self._loading_steps:
            self._ended_in_doubt.clear()
        for number, ranks in report.drained.items():
            self._drain(number, ranks)
        self.stats.stored(report)

    def _loaded(self, name: str, load: LoadReport, now: int) -> None:
        loading = self._loading.get(name)
        if loading is None:
            return
        loading.told = load = load if loading.told is None else loading.told.with_others(load)
        if load.ranks < self._ranks:
            return
        del self._loading[name]
        self._link.learn(load.nbytes // self._ranks, load.took_ns, now)
        self.stats.loaded(load)
        order = loading.order
        wanted = order.first + len(order.into[0])
        came = load.blocks if self._layout.may_fail_in_part or load.blocks == wanted else order.first
        if load.loss > Loss.EXACT:
            self._lossy.add(loading.names[: came - order.first], load.loss)
        if came < wanted and order.layerwise:
            self._distrust(order, set(order.into[0][came - order.first :]))
        request = self._requests.get(name)
        if request is None or request.loading is not order:
            return
        request.loaded(came, load.nbytes, load.loss)
        self._end_lookup(request)
        if came < wanted:
            request.load_failed = True
            request.miss = load.miss
            request.stored = min(request.stored, came)

    def _in_doubt(self) -> set[int]:
        """Blocks that are to be loaded within passes that are out."""
        within = (loading.order for loading in self._loading.values() if loading.order.layerwise)
        return {block for order in within for block in order.into[0]}

    def _distrust(self, failed: LoadOrder, blocks: set[int]) -> None:
        """These blocks are computed after all, by the request that failed to load them. Whoever else has them in its
        table through the engine's own cache stores nothing: that its KV is right would rest on the engine's order. And
        that cache forgets them, and what was computed over them: who is to compute them anew may end before it does."""
        tables = self._ended_in_doubt
        for request in self._requests.values():
            if request.has(blocks):
                request.private = request.private or request.of_engine.request_id != failed.request
                tables = [*tables, request.table[0]]
        wrong = set(blocks)
        for table in tables:
            first = next((at for at, block in enumerate(table) if block in blocks), len(table))
            wrong.update(table[first:])
        self._forget(wrong)

    def _drain(self, number: int, ranks: int) -> None:
        if number not in self._drained:
            return
        name, left = self._drained[number]
        if left > ranks:
            self._drained[number] = name, left - ranks
            return
        del self._drained[number]
        request = self._requests.get(name)
        if request is not None:
            request.orders.discard(number)

    # ------------------------------------------------------------------------------------------------- at its end

    def finished(self, of_engine: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks are still read, and what its answer is to say."""
        name = of_engine.request_id
        request = self._requests.pop(name, None)
        if request is None:
            return False, None
        self._end_lookup(request)
        self._gone.append(name)
        if request.has(self._in_doubt()):
            self._ended_in_doubt.append(request.table[0])
        # The blocks of a load that is under way the engine keeps by itself.
        hold = bool(request.orders) and request.loading is None
        if hold:
            self._held.append(name)
            self._kept.add(name)
        return hold, self._answer(request)

    def _answer(self, request: RequestState) -> dict[str, Any] | None:
        """What goes with a request's answer."""
        told = {"kvcluster": request.report()} if self._settings.report else None
        if not handover.is_asked(compat.transfer_params(request.of_engine)):
            return told
        blocks = min(request.stored, request.of_engine.num_prompt_tokens // self._layout.block_tokens)
        promise = handover.promise(request.chain, 0 if request.private else min(blocks, len(request.chain)))
        if told is not None:
            promise["kvcluster"] |= told["kvcluster"]
        return promise

    def _lose_blocks(self, request: RequestState) -> None:
        """It was preempted, which is noticed here or when it is looked up again, whichever comes first."""
        preemptions = compat.preemptions(request.of_engine)
        if request.preemptions < preemptions:
            request.preemptions = preemptions
            request.lose_blocks()
            self._end_lookup(request)

    def _end_lookup(self, request: RequestState) -> None:
        if request.lookup is not None:
            request.lookup.leave()
            request.lookup = None

    # --------------------------------------------------------------------------------------------- the whole engine

    @property
    def keeps_blocks(self) -> bool:
        """Are blocks of requests that ended about to be given back?"""
        return bool(self._kept)

    def gave_back(self, names: Collection[str]) -> None:
        """The workers read the blocks of these requests no more, so that the engine frees them."""
        self._kept.difference_update(names)

    def reset(self, *, ready: bool = False) -> None:
        """The engine's weights may have changed: whoever runs or comes is alone from now on. `ready` as of
        Registration.withdraw."""
        self._registration.withdraw(ready=ready)
        for request in self._requests.values():
            self._end_lookup(request)
            request.private = request.load_failed = True
        self._lossy.clear()

    def close(self) -> None:
        for request in self._requests.values():
            self._end_lookup(request)
        self._lookups.close()
        self._registration.close()
