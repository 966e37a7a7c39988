"""What a worker's open sequences do with its resident set: which page a token is written to, which blocks are sealed,
stored, shared, copied and given up. Pure: it knows no memory, no clock and no thread.

    open, fork, truncate, close                  what the caller does with a sequence
    begin_step, advance, encode                  how it grows: every layer appends, then all tokens count
    reserve, mark_written                        how it grows if another writer writes its pages
    own                                          how it is overwritten
    take, placed                                 how absent blocks get back into the resident set
    stores                                       how sealed blocks reach the cluster, in batches, in their order

A call that cannot be served raises, and changes nothing. The caller carries out the copies of pages that a call returns
before anything else is written.

A page is written only while one sequence alone refers to its block. Forks and stores refer to blocks, so what they read
never changes: the writer gets a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcluster.core import hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, SequenceId
from kvcluster.core.miss import Loss
from kvcluster.errors import CallerError
from kvcluster.sequences.block_pages import BlockPages
from kvcluster.sequences.block_table import ABSENT, PageCopy, TokenRun
from kvcluster.sequences.blocks import PageNumber, SequenceBlock, StoreState, release, retain
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.resident_window import Encoding, ResidentWindow
from kvcluster.sequences.state import SealExtent, SequenceState
from kvcluster.sequences.store_queue import StoreQueue
from kvcluster.sequences.window_policy import WindowPolicy


class OpenSequences:
    """The open sequences of one client. `random_id` returns a new random id of 32 bytes for a private block."""

    def __init__(
        self, pages: ResidentPages, random_id: Callable[[], bytes], *, block_tokens: int, layers: int, run_blocks: int
    ) -> None:
        self.pages = pages
        self._random_id = random_id
        self._block_tokens = block_tokens
        self._layers = layers
        self._blocks = BlockPages(pages)
        self.stores = StoreQueue(run_blocks, self._blocks.may_give_up, self._blocks.free_page, self._blocks.released)
        self._open: dict[SequenceId, SequenceState] = {}
        self._window = ResidentWindow(pages, self._blocks)

    # ----------------------------------------------------------------------------------- opening and closing

    def open(self, state: SequenceState, cached: Sequence[tuple[BlockHash, bytes, Loss]] = ()) -> None:
        """Opens a sequence that begins with these blocks, which the cluster has: the name, token ids and loss of each.
        None of them is in the resident set."""
        tip: SequenceBlock | None = None
        for name, tokens, loss in cached:
            tip = SequenceBlock(tip, None, state.family)
            tip.name, tip.tokens, tip.loss, tip.stored = name, tokens, max(loss, tip.loss), StoreState.YES
            tip.stays = self._is_sink(state, tip)
            state.add(tip)
        state.sealed = len(cached)
        state.length, state.encoded = len(cached) * self._block_tokens, len(cached)
        state.loss = tip.loss if tip is not None else Loss.EXACT
        retain(tip)
        self._open[state.name] = state
        state.family[state] = None

    def fork(self, state: SequenceState, name: SequenceId) -> SequenceState:
        """Opens another sequence with the same tokens. Raises CallerError in the middle of a step."""
        self.check_between_steps(state, "fork")
        child = SequenceState(
            name,
            state.root,
            state.policy,
            block_tokens=self._block_tokens,
            max_tokens=state.max_tokens,
            drop_oldest=state.drop_oldest,
            publish=state.publish,
        )
        child.blocks = state.blocks[: state.blocks_for(state.length)]  # those reserved behind stay the parent's
        child.table.copy_from(state.table, len(child.blocks))
        child.length, child.sealed, child.tokens = state.length, state.sealed, state.tokens[:]
        child.encoded, child.dropped, child.loss = state.encoded, state.dropped, state.loss
        retain(child.tip)
        self._open[name] = child
        child.family = state.family
        child.family[child] = None
        return child

    def check_between_steps(self, state: SequenceState, what: str) -> None:
        """Raises CallerError in the middle of a step."""
        if state.appended:
            raise CallerError(f"cannot {what} in the middle of a step: call advance, or truncate to drop the step")

    def close(self, state: SequenceState) -> None:
        """Closes a sequence. Its public blocks that wait to be stored still will be."""
        del self._open[state.name]
        del state.family[state]
        state.closed = True
        release(state.tip, self._blocks.released)
        state.cut(0)

    # ------------------------------------------------------------------------------------------------ growing

    def begin_step(
        self, states: Sequence[SequenceState], layer: int, tokens: Sequence[int]
    ) -> tuple[list[TokenRun], list[PageCopy]]:
        """Returns where this layer writes the next `tokens[i]` tokens of each sequence, in order, and what is to be
        copied before. Raises CallerError for a layer that has already appended in this step, or a number of tokens that
        differs from its other layers; LimitError beyond `max_tokens`; ResidentSetFull."""
        self._check_layer(states, layer, tokens)
        first_layer = [not state.appended for state in states]
        copies = self._reserve(
            [state for state, first in zip(states, first_layer, strict=True) if first],
            [count for count, first in zip(tokens, first_layer, strict=True) if first],
        )
        runs: list[TokenRun] = []
        for state, count in zip(states, tokens, strict=True):
            self._appended(state, layer, count)
            runs += self.runs(state, state.length, count)
        return runs, copies

    def mark_written(self, states: Sequence[SequenceState], layer: int | None, tokens: Sequence[int]) -> None:
        """Takes the next `tokens[i]` tokens of each sequence, which another writer has written into reserved pages, as
        appended to this layer, or to all layers. Raises CallerError as `begin_step`, and for more tokens than are
        reserved."""
        layers = range(self._layers) if layer is None else (layer,)
        for each in layers:
            self._check_layer(states, each, tokens)
        for state, count in zip(states, tokens, strict=True):
            reserved = state.reserved + state.step
            if count > reserved:
                raise CallerError(
                    f"{count} tokens cannot have been written: pages are reserved for {reserved}. Call reserve before "
                    "they are written, and again after a fork"
                )
        for state, count in zip(states, tokens, strict=True):
            for each in layers:
                self._appended(state, each, count)

    def _check_layer(self, states: Sequence[SequenceState], layer: int, tokens: Sequence[int]) -> None:
        for state, count in zip(states, tokens, strict=True):
            if layer in state.appended:
                raise CallerError(f"layer {layer} has appended its tokens of this step already; call advance first")
            if state.appended and state.step != count:
                raise CallerError(f"layer {layer} appends {count} tokens; the other layers of this step {state.step}")

    def _appended(self, state: SequenceState, layer: int, count: int) -> None:
        state.step = count
        state.appended[layer] = None
        if count and state.loss is not Loss.EXACT:
            for block in state.blocks[state.length // self._block_tokens :]:
                block.loss = max(block.loss, state.loss)

    def reserve(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> list[PageCopy]:
        """Takes the pages that `tokens[i]` more tokens of each sequence need, between two steps: they are written by
        this sequence alone, and no fork has them. Returns what is to be copied. Raises CallerError in the middle of a
        step; LimitError and ResidentSetFull."""
        for state in states:
            self.check_between_steps(state, "reserve")
        return self._reserve(states, tokens)

    def _reserve(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> list[PageCopy]:
        drops = [self._window.drops(state, count) for state, count in zip(states, tokens, strict=True)]
        pages = freed = 0
        for state, count, blocks in zip(states, tokens, drops, strict=True):
            pages += max(0, state.blocks_for(state.length + count) - len(state.blocks))
            pages += self._shares_next(state, count)
            freed += self._window.freed_bytes(state, blocks) if blocks else 0
        self._blocks.check_room(pages, freed_bytes=freed)
        for state, blocks in zip(states, drops, strict=True):  # first: another row may take what one frees
            if blocks:
                self._window.drop(state, blocks)
        copies: list[PageCopy] = []
        for state, count in zip(states, tokens, strict=True):
            if self._shares_next(state, count):  # no longer, if a fork in this batch has just got a copy of its own
                depth = state.length // self._block_tokens
                with self._blocks.room_to_replace([(state, range(depth, depth + 1))]):
                    copies += self._blocks.replace(state, depth)
            while len(state.blocks) < state.blocks_for(state.length + count):
                block = SequenceBlock(state.tip, self._blocks.take(), state.family)
                block.stays = state.policy.coding is not Codec.RAW
                block.references = 1  # of the sequence, which no longer ends with the block before
                if block.before is not None:
                    block.before.references -= 1
                state.add(block)
        return copies

    def _shares_next(self, state: SequenceState, tokens: int) -> bool:
        """Whether so many more tokens begin in a block that others share. Blocks behind it, which were reserved, are
        this sequence's alone."""
        depth, kept = divmod(state.length, self._block_tokens)
        return tokens > 0 and kept > 0 and state.blocks[depth].shared

    def runs(self, state: SequenceState, position: int, tokens: int) -> list[TokenRun]:
        """Returns where these tokens lie. All of their blocks must be in the resident set."""
        runs: list[TokenRun] = []
        while tokens:
            block, first = divmod(position, self._block_tokens)
            count = min(tokens, self._block_tokens - first)
            assert state.table[block] != ABSENT
            runs.append(TokenRun(state.table[block], first, count))
            position += count
            tokens -= count
        return runs

    def advance(self, states: Sequence[SequenceState], tokens: Sequence[int | Sequence[int]]) -> list[SequenceState]:
        """Counts the tokens of this step, whose ids are given for each sequence, or only their number. Returns the
        sequences of which blocks were sealed; `encode` has to follow. Raises CallerError if not all layers have
        appended as many, or for something that is no token id; ResidentSetFull."""
        nbytes = 0
        ids: list[array[int] | None] = []
        for state, given in zip(states, tokens, strict=True):
            ids.append(None if isinstance(given, int) else hashing.token_array(given))
            self._check_advance(state, given if isinstance(given, int) else len(given))
            nbytes += self._window.nbytes(state, state.step)
        self._blocks.check_bytes(nbytes)
        for state, known in zip(states, ids, strict=True):
            if known is not None and len(state.tokens) == state.length - state.sealed * self._block_tokens:
                state.tokens.extend(known)
            state.length += state.step
            self._end_step(state)
        return self._seal_each(states, SealExtent.DUE)

    def _check_advance(self, state: SequenceState, count: int) -> None:
        if len(state.appended) != self._layers or count != state.step:
            missing = [layer for layer in range(self._layers) if layer not in state.appended]
            where = f", not in layer {missing[0]}" if missing and state.appended else ""
            raise CallerError(
                f"advance names {count} tokens; this step has {state.step} in {len(state.appended)} of {self._layers} "
                f"layers{where}: append them to every layer"
            )

    def encode(self, state: SequenceState) -> Iterator[Encoding]:
        """Returns what is to be encoded after `advance`. `encoded` has to be called with each before the next."""
        return self._window.encode(state)

    def encoded(self, state: SequenceState, encoding: Encoding, *, succeeded: bool) -> None:
        """A block was encoded. If it cannot be, it stays raw."""
        self._window.encoded(state, encoding, succeeded=succeeded)

    def free_encoded(self) -> bool:
        """Frees raw pages that no sequence uses and that will not be stored. Returns whether there were any."""
        freed = [self._window.free_raw(state) for state in self.open_states()]
        return any(freed)

    def set_policy(self, state: SequenceState, policy: WindowPolicy) -> None:
        """Changes the policy. It applies to what leaves the tail from now on."""
        if state.policy.coding is Codec.RAW:
            left = max(0, state.length - policy.tail_tokens) // self._block_tokens
            state.encoded = max(state.encoded, left)
        state.policy = policy
        for block in state.blocks[state.encoded :] if policy.coding is not Codec.RAW else ():
            block.stays = True
            self.pages.must_keep(block)

    def seal(self, state: SequenceState, extent: SealExtent = SealExtent.DUE) -> list[SequenceState]:
        """Names the blocks of this extent, and queues them to be stored. Returns the sequences that have more sealed
        blocks: this one, and those that share some. All of them claim a block that has left the resident set, or it
        would be erased when the others are closed."""
        sealed: dict[SequenceState, None] = {}
        for _ in range(state.sealable(extent)):
            depth = state.sealed
            block = state.blocks[depth]
            sharing = [state, *(other for other in block.family if other is not state and other.shares(block, depth))]
            # One that has dropped nothing names the block first: it was made before another dropped anything.
            for one in sorted(sharing, key=lambda one: bool(one.dropped)):
                while one.sealed <= depth:  # more than one where another has dropped some
                    self._seal_next(one)
                    sealed[one] = None
        return [*sealed]

    def _seal_next(self, state: SequenceState) -> None:
        block, private = state.blocks[state.sealed], state.private()
        if block.name is None:
            self._name(state, block, private=private)
            if block.page is not None:  # else it was dropped, or is there encoded: it is never stored
                self.stores.add(block)
        del state.tokens[: self._block_tokens]
        if private:
            del state.tokens[:]
        state.sealed += 1

    def _seal_each(self, states: Iterable[SequenceState], extent: SealExtent) -> list[SequenceState]:
        return [*{sealed: None for state in states for sealed in self.seal(state, extent)}]

    # ------------------------------------------------------------------------------------ cutting, overwriting

    def check_kept(self, state: SequenceState, first: int, stop: int, what: str) -> None:
        """Raises CallerError if some of the tokens from position `first` up to `stop` were dropped."""
        dropped = state.dropped_tokens
        if first < dropped.stop and stop > dropped.start:
            raise CallerError(
                f"cannot {what} here: tokens {dropped.start} to {dropped.stop} were dropped: the sequence was opened "
                f"with drop_oldest and max_tokens={state.max_tokens}"
            )

    def unsealed_by(self, state: SequenceState, tokens: int) -> list[SequenceBlock]:
        """Returns the block that a truncation to `tokens` tokens would cut, if it is absent: it was sealed for this
        sequence or for a fork."""
        depth, kept = divmod(tokens, self._block_tokens)
        return [state.blocks[depth]] if kept and state.table[depth] == ABSENT else []

    def truncate(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> list[PageCopy]:
        """Keeps the first `tokens[i]` tokens of each sequence, and drops the present step. Blocks that this cuts must
        be in the resident set; one that is sealed is sealed again later, with the precision that it has lost. Returns
        what is to be copied. Raises CallerError if there are fewer tokens; ResidentSetFull."""
        cuts: list[tuple[SequenceState, range]] = []
        for state, count in zip(states, tokens, strict=True):
            if not 0 <= count <= state.length:
                raise CallerError(f"cannot truncate to {count} tokens: the sequence has {state.length}")
            self.check_kept(state, count, count, "truncate")
            if count % self._block_tokens and count < state.length:
                depth = count // self._block_tokens
                cuts.append((state, range(depth, depth + 1)))
        copies: list[PageCopy] = []
        with self._blocks.room_to_replace(cuts):
            for state, count in zip(states, tokens, strict=True):
                copies += self._cut(state, count)
        return copies

    def _cut(self, state: SequenceState, tokens: int) -> list[PageCopy]:
        depth, kept = divmod(tokens, self._block_tokens)
        cuts_block = kept and tokens < state.length
        if depth < state.sealed:
            state.tokens = hashing.token_ids(state.blocks[depth].tokens[: 4 * kept] if kept else b"")
            state.sealed = depth
        else:
            del state.tokens[max(0, tokens - state.sealed * self._block_tokens) :]
        blocks, old = state.blocks_for(tokens), state.tip
        retain(state.blocks[blocks - 1] if blocks else None)
        state.cut(blocks)
        release(old, self._blocks.released)
        state.length = tokens
        self._end_step(state)
        # A fork that has all of the block that is cut may seal it later, and give up its page: so it is replaced.
        return self._blocks.replace(state, depth) if cuts_block else []

    def own(self, states: Sequence[SequenceState], positions: Sequence[int]) -> list[PageCopy]:
        """Prepares the tokens at `positions[i]` of each sequence to be overwritten: their block, and every block behind
        it, is that sequence's alone, and unsealed. All of them must be in the resident set. Returns what is to be
        copied. Raises ResidentSetFull."""
        copies: list[PageCopy] = []
        depths = [position // self._block_tokens for position in positions]
        for state, position in zip(states, positions, strict=True):
            self.check_kept(state, position, state.length, "overwrite")
        suffixes = [(state, range(depth, len(state.blocks))) for state, depth in zip(states, depths, strict=True)]
        with self._blocks.room_to_replace(suffixes):
            for state, position, depth in zip(states, positions, depths, strict=True):
                copies += self._blocks.replace(state, depth)
                if depth < state.sealed:
                    state.sealed = depth
                    del state.tokens[:]
                del state.tokens[max(0, position - state.sealed * self._block_tokens) :]
        return copies

    # ------------------------------------------------------------------------------- out of the set and back

    def take(self, pages: int) -> list[PageNumber]:
        """Takes pages, into which the caller loads absent blocks: it frees them (`pages.free`), or gives them to blocks
        (`placed`). Raises ResidentSetFull."""
        self._blocks.check_room(pages)
        return [self._blocks.take() for _ in range(pages)]

    def hold(self, blocks: Sequence[SequenceBlock]) -> None:
        """Has blocks keep their pages, or those that they will get, until `let_go`: they are needed together."""
        for block in blocks:
            self.pages.hold(block)

    def let_go(self, blocks: Sequence[SequenceBlock]) -> None:
        """Withdraws a `hold` of these blocks."""
        for block in blocks:
            self.pages.let_go(block)
            self._blocks.may_give_up(block)

    def placed(self, block: SequenceBlock, page: PageNumber, *, loaded: bool) -> None:
        """The load of a placed block has ended: it is in the resident set, or its page is free again."""
        if not loaded or block.page is not None or not block.references:
            self.pages.free(page)
            return
        block.page = page
        self._blocks.write_entry(block, page)
        self._blocks.may_give_up(block)

    def seal_all(self) -> list[SequenceState]:
        """Seals all full blocks before the tails of all sequences, so that they can be stored and give up their pages.
        Returns the sequences of which some were sealed."""
        return self._seal_each(self.open_states(), SealExtent.BEFORE_TAIL)

    def is_stored(self, state: SequenceState) -> bool:
        """Whether the cluster has all sealed blocks of a sequence that are to be stored: those that were dropped, or
        are left in encoded form alone, are not."""
        return all(
            block.stored is StoreState.YES or block.dropped or (block.page is None and block.coded is not None)
            for block in state.blocks[: state.sealed]
        )

    def open_states(self) -> list[SequenceState]:
        """Returns the open sequences."""
        return [*self._open.values()]

    def check(self) -> None:
        """Asserts that tables, blocks and pages agree."""
        self.pages.check()
        seen: dict[SequenceBlock, None] = {}
        for state in self._open.values():
            assert len(state.table) == len(state.blocks) >= state.blocks_for(state.length) and state.sealed <= len(
                state.blocks
            )
            for depth, block in enumerate(state.blocks):
                assert block.depth == depth and block.before is (state.blocks[depth - 1] if depth else None)
                raw = ABSENT if block.page is None or depth in state.dropped else block.page
                assert state.table[depth] == (block.coded.entry if block.coded and state.table[depth] < ABSENT else raw)
                assert (block.name is not None) or depth >= state.sealed
                there = block.page is not None or block.coded is not None or block.dropped
                assert there or block.stored is StoreState.YES, "the only copy of a block is lost"
                seen[block] = None
        for block in self.stores.blocks:
            while block.before is not None and block not in seen:
                seen[block] = None
                block = block.before
            seen[block] = None
        held = [block.page for block in seen if block.page is not None]
        assert len(dict.fromkeys(held)) == len(held) <= self.pages.used, "two blocks in one page"
        coded = [block.coded for block in seen if block.coded is not None]
        assert len(dict.fromkeys(coded)) == len(coded), "two blocks in one slot"

    # ------------------------------------------------------------------------------------------- helpers

    def _name(self, state: SequenceState, block: SequenceBlock, *, private: bool) -> None:
        block.private = private
        block.stays = block.stays or self._is_sink(state, block)
        if private:
            block.name = BlockHash(self._random_id())
            return
        ids = state.tokens[: self._block_tokens]
        (block.name,) = hashing.chain(state.parent, ids, self._block_tokens)
        block.tokens = hashing.token_bytes(ids)

    def _is_sink(self, state: SequenceState, block: SequenceBlock) -> bool:
        return block.depth * self._block_tokens < state.policy.sink_tokens

    def _end_step(self, state: SequenceState) -> None:
        state.step = 0
        state.appended.clear()
