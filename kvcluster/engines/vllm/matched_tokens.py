"""How many tokens of a request to load, which is decided before it runs, and whether within a forward pass.

The matcher looks the prompt's blocks up at the coordinator (async_lookup.py), and waits a little for blocks that are
still being stored. It does not load what this engine would compute faster, by the rates that the engine's own steps and
loads have shown.

An engine with several block tables cannot roll back part of a load, only a whole request that waits for the load; so
its loads run beside the forward passes. With one table, a load that is expected to be short runs within a forward pass,
layer by layer. This module reads no clock: `now` is an argument.
"""

from __future__ import annotations

import kvcluster.engines.vllm.compat as compat
import kvcluster.engines.vllm.pd_disagg as handover
from kvcluster.core import limits
from kvcluster.core.breakeven import Breakeven
from kvcluster.core.miss import Miss, MissReason
from kvcluster.engines.vllm.async_lookup import Ask, AsyncLookups, PrefixQuestion
from kvcluster.engines.vllm.request_state import RequestState
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.stats import PrefillRate
from kvcluster.transfers.bandwidth import BandwidthEstimator
from kvcluster.transfers.tickets import Ticket

_PENDING_NS = 100_000_000
"""The longest that a request waits for a block that another client is storing: most stores end much sooner."""


class PrefixMatcher:
    """The lookups of one scheduler, and the rates that it compares. Every method returns at once."""

    def __init__(self, settings: ConnectorSettings, layout: compat.Layout) -> None:
        self._settings = settings
        self._layout = layout
        self.lookups = AsyncLookups(settings.lookup_ms * 1_000_000)
        self.bandwidth = BandwidthEstimator()
        self.prefill = PrefillRate(settings.prefill_tokens_per_s)

    def match(self, request: RequestState, now: int) -> tuple[int | None, bool]:
        """Returns the number of tokens to load behind `request.local_tokens` (None while that is not known), and
        whether they are loaded beside the forward passes. `request.lookup` stays set if there are any."""
        if self._asked(request) * self._layout.block_tokens <= request.local_tokens:  # nothing to ask for
            request.end_lookup()
            return 0, False
        if now < request.look_again_ns:
            return None, False
        ticket = self._look_up(request, now)
        if ticket is None:
            return (0 if request.lookup is None else None), False
        if self._should_wait(request, ticket, now):
            request.end_lookup()
            return None, False
        tokens = ticket.blocks * self._layout.block_tokens - request.local_tokens
        if tokens <= 0 or self._better_computed(request, tokens, now):
            request.end_lookup()
            return 0, False
        return tokens, not request.layerwise

    def _asked(self, request: RequestState) -> int:
        """Returns the number of blocks to look up. The last token must be computed in any case, since the engine needs
        its output; so a block that ends with that token is not looked up."""
        return min(int(request.of_engine.num_tokens - 1) // self._layout.block_tokens, limits.BLOCKS_PER_PROMPT)

    def _look_up(self, request: RequestState, now: int) -> Ticket | None:
        """Returns the lookup's ticket; None while the lookup runs (`request.lookup` stays set) or if there is none."""
        if request.lookup is None:
            begun = self.lookups.begin(self._asker(request, now), now)
            if begun is None or isinstance(begun, Miss):
                request.miss = begun or Miss(MissReason.PENDING, "other lookups come first")
                return None
            request.lookup = begun
        answer = self.lookups.look(request.lookup, now)
        if answer is None:
            return None
        request.miss = answer.miss
        if answer.ticket is None:
            request.end_lookup()
            return None
        if len(answer.hashes) > len(request.chain):
            request.chain = list(answer.hashes)
        return answer.ticket

    def _should_wait(self, request: RequestState, ticket: Ticket, now: int) -> bool:
        """Whether the request should wait and look up again, because more blocks are being stored: another server has
        promised them, or another client is storing the next block now, and usually stores more of the same prompt
        behind it. The coordinator does not count such a lookup. Once the request has waited for long enough, its last
        lookup is marked as the last, so it is counted, and what it finds is loaded."""
        if request.is_last_lookup:
            return False
        if ticket.blocks < self._promised(request):
            patience_ns = self._settings.handover_ms * 1_000_000
        elif ticket.miss is not None and ticket.miss.reason is MissReason.PENDING:
            patience_ns = _PENDING_NS
        else:
            return False
        request.wait_until_ns = request.wait_until_ns or now + patience_ns
        request.look_again_ns = min(now + handover.PAUSE_NS, request.wait_until_ns)
        return True

    def _promised(self, request: RequestState) -> int:
        """Returns how many leading blocks another server has promised, of those that this engine can find."""
        promised = handover.promised(compat.transfer_params(request.of_engine))
        return min(promised, self._asked(request), request.shared_blocks)

    def _asker(self, request: RequestState, now: int) -> Ask:
        """Returns the lookup of a request's cached prefix."""
        request.is_last_lookup = bool(request.wait_until_ns) and now >= request.wait_until_ns
        awaited = None if request.is_last_lookup else self._promised(request)
        blocks, deadline_ms, reader = self._asked(request), self._settings.lookup_ms, request.reader
        grow = request.grower(blocks, deadline_ms)
        also = None if reader is None else (reader, request.grower(blocks, deadline_ms, of=reader))

        def ask() -> PrefixQuestion:
            return PrefixQuestion(request.client, grow(), request.adapter, awaited, also)

        return ask

    def _better_computed(self, request: RequestState, tokens: int, now: int) -> bool:
        """Returns whether computing `tokens` tokens is faster than loading them. If not, sets `request.layerwise`."""
        prefill = self.prefill.known()
        even = Breakeven(request.client.spec, self._layout.largest, prefill or 1)
        link = self.bandwidth.estimate(even.nbytes(tokens), now)
        request.layerwise = False
        if link is None:
            return False  # this load measures it
        miss = None if prefill is None else even.miss(tokens, link)
        if miss is not None:
            request.miss = miss
            return True
        expected_ns = link.load_ns(even.nbytes(tokens))
        request.layerwise = self._layout.may_fail_in_part and expected_ns <= self._settings.layerwise_ms * 1_000_000
        return False
