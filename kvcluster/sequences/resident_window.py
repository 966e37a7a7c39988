"""What leaves the precise part of a sequence: older blocks are encoded in the resident set, and the oldest are dropped.
Pure.

Blocks are encoded when they leave the tail, in batches, at lengths that the policy alone determines, so that a
generation can be repeated. A block that will be stored keeps its raw page, too, until the cluster has it, since it is
stored as it was before. A fork whose policy encodes nothing continues to use the raw page; so a table entry names the
form that its sequence uses.

A sequence that drops the oldest keeps positions: the blocks stay in its table, as absent, and attention leaves them
out. What it makes from then on depends on what it dropped, so it is private.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.errors import LimitError
from kvcluster.sequences.block_pages import BlockPages
from kvcluster.sequences.block_table import ABSENT, CodedPage, coded_page
from kvcluster.sequences.blocks import PageNumber, SequenceBlock, StoreState
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.state import SequenceState

_DROPS = 16
"""How often the oldest blocks are dropped while `max_tokens` tokens are made."""


class Encoding(NamedTuple):
    """Encode a block of a sequence from its raw page into a slot."""

    depth: int
    page: PageNumber
    into: CodedPage


class ResidentWindow:
    """Encodes and drops blocks of the sequences that share `pages`, which `blocks` gives them."""

    def __init__(self, pages: ResidentPages, blocks: BlockPages) -> None:
        self._pages = pages
        self._blocks = blocks

    # ------------------------------------------------------------------------------------------- encoding

    def due(self, state: SequenceState, tokens: int) -> range:
        """Returns the depths that are to be encoded when a sequence has `tokens` more tokens."""
        policy, block_tokens = state.policy, state.block_tokens
        stop = max(state.encoded, (state.length + tokens - policy.tail_tokens) // block_tokens)
        batch = max(1, policy.migration_tokens // block_tokens)
        if policy.coding is Codec.RAW or stop - state.encoded < batch:
            return range(0)
        return range(max(state.encoded, state.blocks_for(policy.sink_tokens)), stop)

    def nbytes(self, state: SequenceState, tokens: int) -> int:
        """Returns how many more bytes the encoded blocks then take at a time."""
        due = self.due(state, tokens)
        new = sum(depth >= len(state.blocks) or state.blocks[depth].coded is None for depth in due)
        if not new:
            return 0
        nbytes = self._pages.nbytes(state.policy.coding)
        if nbytes <= self._pages.page_bytes and all(self._frees_raw(state, depth) for depth in due):
            return nbytes  # each of them frees its raw page before the next is encoded
        return new * nbytes

    def encode(self, state: SequenceState) -> Iterator[Encoding]:
        """Yields what is to be encoded now; `encoded` is called with each before the next. There must be memory. Slots
        are taken last: what the sequence uses encoded by then may give up its page for them."""
        codec = state.policy.coding
        depths = self.due(state, 0)
        fresh = [state.blocks[depth] for depth in depths if state.blocks[depth].coded is None]
        for depth in depths:
            coded, block = state.blocks[depth].coded, state.blocks[depth]
            if coded is not None and coded.codec is codec:
                self._use_coded(state, depth)
            elif coded is not None:  # a fork has encoded it in another codec: this one goes on with the raw page
                block.stays = False
                if block.stored is StoreState.YES and block.page is not None:
                    self._pages.may_give_up(block)
        for block in fresh:
            if block.page is not None:
                yield from self._encodings(block, codec)
        if depths:
            state.encoded = depths.stop

    def _encodings(self, block: SequenceBlock, codec: Codec) -> Iterator[Encoding]:
        """Yields how this block is encoded; nothing if it is the one that gave up its page for the slot."""
        into = CodedPage(codec, self._blocks.take(codec))
        if block.page is not None:
            yield Encoding(block.depth, block.page, into)
        else:
            self._pages.free(into.slot, codec)

    def encoded(self, state: SequenceState, encoding: Encoding, *, succeeded: bool) -> None:
        """A block was encoded, or cannot be: then it stays raw."""
        block = state.blocks[encoding.depth]
        if succeeded:
            block.coded = encoding.into
            self._use_coded(state, encoding.depth)
        else:
            self._pages.free(encoding.into.slot, encoding.into.codec)
            self._leave(state, encoding.depth)

    def _use_coded(self, state: SequenceState, depth: int) -> None:
        block = state.blocks[depth]
        assert block.coded is not None
        state.table[depth] = block.coded.entry
        state.loss = max(state.loss, block.coded.codec.loss)
        self._leave(state, depth)

    def _leave(self, state: SequenceState, depth: int) -> None:
        """A block has left the tail: its raw page may be given up, or is free if it will never be stored."""
        block = state.blocks[depth]
        block.stays = False
        if block.stored is StoreState.YES and block.page is not None:
            self._pages.may_give_up(block)
        elif block.page is not None and block.coded is not None and self._frees_raw(state, depth):
            self._pages.free(block.page)
            block.page = None

    def free_raw(self, state: SequenceState) -> bool:
        """Frees the raw pages of encoded blocks that other sequences used and use no longer, if they will never be
        stored. Returns whether there were any."""
        found = False
        for depth in () if state.publish else range(state.encoded):
            block = state.blocks[depth]
            if block.page is not None and coded_page(state.table[depth]) and self._frees_raw(state, depth):
                self._pages.free(block.page)
                block.page, found = None, True
        return found

    def _frees_raw(self, state: SequenceState, depth: int) -> bool:
        """Whether the raw page of a block is free once this sequence has it encoded: it will never be stored, and all
        others that have it use its encoded form."""
        if depth < len(state.blocks) and state.blocks[depth].name is not None:
            return False
        if state.publish and not state.dropped:
            return False
        return depth >= len(state.blocks) or all(coded_page(other.table[depth]) for other in self._others(state, depth))

    # ------------------------------------------------------------------------------------------- dropping

    def drops(self, state: SequenceState, tokens: int) -> int:
        """Returns how many blocks are dropped before a sequence gets `tokens` more tokens. Raises LimitError if that is
        not allowed, or not enough."""
        kept = state.length - len(state.dropped) * state.block_tokens + tokens
        if kept <= state.max_tokens and state.length + tokens <= limits.TOKENS_PER_SEQUENCE:
            return 0
        if not state.drop_oldest:
            raise LimitError(
                f"{state.length} tokens and {tokens} more exceed max_tokens={state.max_tokens}: truncate the sequence, "
                "or open it with a larger max_tokens, or with drop_oldest=True"
            )
        needed = state.blocks_for(kept - state.max_tokens)
        most = state.length // state.block_tokens - self._next_drop(state)
        if needed > most or state.length + tokens > limits.TOKENS_PER_SEQUENCE:
            raise LimitError(
                f"{tokens} more tokens exceed max_tokens={state.max_tokens} even if all but the sinks are dropped: "
                "append fewer at a time, or open the sequence with a larger max_tokens"
            )
        return min(most, max(needed, state.max_tokens // _DROPS // state.block_tokens))

    def freed_bytes(self, state: SequenceState, blocks: int) -> int:
        """Returns the bytes that dropping so many blocks frees at once."""
        first, nbytes = self._next_drop(state), 0
        for depth in range(first, first + blocks):
            block = state.blocks[depth]
            if not any(self._others(state, depth)):
                unstored = block.name is None or (block.private and block.stored is StoreState.NO)
                nbytes += self._pages.page_bytes if unstored and block.page is not None else 0
                nbytes += self._pages.nbytes(block.coded.codec) if block.coded is not None else 0
        return nbytes

    def drop(self, state: SequenceState, blocks: int) -> None:
        """Drops the oldest so many blocks behind the sinks."""
        first = self._next_drop(state)
        for depth in range(first, first + blocks):
            block = state.blocks[depth]
            state.table[depth] = ABSENT
            if any(self._others(state, depth)):
                continue
            block.dropped, block.stays = True, False
            if block.coded is not None:
                self._pages.free(block.coded.slot, block.coded.codec)
                block.coded = None
            if block.page is not None and (block.name is None or (block.private and block.stored is StoreState.NO)):
                self._pages.free(block.page)  # the queue of stores leaves it out
                block.page = None
            elif block.page is not None and block.stored is StoreState.YES:
                self._pages.may_give_up(block)
        state.dropped = range(state.dropped.start if state.dropped else first, first + blocks)
        state.encoded = max(state.encoded, state.dropped.stop)
        del state.tokens[:]

    @staticmethod
    def _next_drop(state: SequenceState) -> int:
        return state.dropped.stop if state.dropped else state.blocks_for(state.policy.sink_tokens)

    @staticmethod
    def _others(state: SequenceState, depth: int) -> Iterator[SequenceState]:
        """Yields the other sequences that have the block and attend to it."""
        block = state.blocks[depth]
        for other in state.family:
            there = depth < len(other.blocks) and other.blocks[depth] is block
            if there and other is not state and depth not in other.dropped:
                yield other
