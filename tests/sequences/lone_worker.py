"""A worker with open sequences and no cluster but a dict: what the machine of sequences is tried with."""

from __future__ import annotations

import hashlib
import itertools

from kvcluster.core import hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, SequenceId
from kvcluster.core.miss import Loss
from kvcluster.sequences.block_table import CodedPage, PageCopy, coded_page
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.store_queue import StoreBatch
from kvcluster.sequences.window_policy import WindowPolicy

BLOCK = 4
PAGES = 12
RUN = 4
ROOT = hashing.root(NamespaceId(bytes(32)))
LAYERS = 2
UNCODED = 13
"""A number that no codec has a code for."""


class Worker:
    """A machine with a memory of one value for each token and layer, and a cluster that keeps what is stored."""

    def __init__(self, pages: int = PAGES, policy: WindowPolicy | None = None, max_tokens: int = 1_000) -> None:
        ids = (hashlib.sha256(b"%d" % n).digest() for n in itertools.count())
        self.pages = ResidentPages(pages, 4, {Codec.Q8: 2, Codec.Q4: 1}, self.unback)
        self.coded: dict[CodedPage, list[int]] = {}
        self.machine = OpenSequences(self.pages, lambda: next(ids), block_tokens=BLOCK, layers=LAYERS, run_blocks=RUN)
        self.memory = {
            (layer, page, slot): -1 for layer in range(LAYERS) for page in range(pages) for slot in range(BLOCK)
        }
        self.cluster: dict[BlockHash, list[int]] = {}
        self.names = itertools.count(1)
        self.policy = policy or WindowPolicy(tail_tokens=BLOCK, migration_tokens=2 * BLOCK)
        self.max_tokens = max_tokens

    def unback(self, codec: Codec, number: int) -> None:
        """Memory that is given back has no content any more."""
        if codec is not Codec.RAW:
            self.coded.pop(CodedPage(codec, number), None)
            return
        for layer, slot in itertools.product(range(LAYERS), range(BLOCK)):
            self.memory[layer, number, slot] = -1

    def name(self) -> SequenceId:
        return SequenceId(next(self.names).to_bytes(16, "big"))

    def open(
        self,
        cached: list[tuple[BlockHash, bytes, Loss]] | None = None,
        *,
        drop_oldest: bool = False,
        publish: bool = True,
    ) -> SequenceState:
        state = SequenceState(
            self.name(),
            ROOT,
            self.policy,
            block_tokens=BLOCK,
            max_tokens=self.max_tokens,
            drop_oldest=drop_oldest,
            publish=publish,
        )
        self.machine.open(state, cached or [])
        return state

    def append(self, state: SequenceState, values: list[int], *, ids: bool = True) -> None:
        for layer in range(LAYERS):
            runs, copies = self.machine.begin_step([state], layer, [len(values)])
            self.copy(copies)
            slots = [(run.entry, run.first + at) for run in runs for at in range(run.tokens)]
            for (page, slot), value in zip(slots, values, strict=True):
                self.memory[layer, page, slot] = value + 1_000_000 * layer
        self.machine.advance([state], [values if ids else len(values)])
        self.encode(state)

    def encode(self, state: SequenceState) -> None:
        for encoding in self.machine.encode(state):
            self.coded[encoding.into] = self.page(encoding.page)
            self.machine.encoded(state, encoding, succeeded=UNCODED not in self.coded[encoding.into])

    def copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            content = iter(self.content(copy.source))
            for layer, slot in itertools.product(range(LAYERS), range(BLOCK)):
                self.memory[layer, copy.target, slot] = next(content)

    def content(self, entry: int) -> list[int]:
        """The page that an entry of a block table stands for."""
        coded = coded_page(entry)
        return self.page(entry) if coded is None else self.coded[coded]

    def page(self, page: int) -> list[int]:
        return [self.memory[layer, page, slot] for layer in range(LAYERS) for slot in range(BLOCK)]

    def store(self, *, fails: bool = False) -> StoreBatch | None:
        batch = self.machine.stores.next()
        if batch is not None:
            for block, name in zip(batch.blocks, batch.names[-len(batch.blocks) :], strict=True):
                assert block.page is not None and block.name == name
                if not fails:
                    known = self.cluster.setdefault(name, self.page(block.page))
                    assert known == self.page(block.page), "two contents of one name"
            self.machine.stores.ended(batch, committed=not fails)
        return batch

    def bring(self, state: SequenceState, depths: range) -> None:
        absent = [state.blocks[depth] for depth in state.absent(depths)]
        for block, page in zip(absent, self.machine.take(len(absent)), strict=True):
            assert block.name is not None
            content = iter(self.cluster[block.name])
            for layer, slot in itertools.product(range(LAYERS), range(BLOCK)):
                self.memory[layer, page, slot] = next(content)
            self.machine.placed(block, page, loaded=True)

    def read(self, state: SequenceState) -> list[int]:
        """The tokens of a sequence, brought back block by block."""
        values: list[int] = []
        for position in range(state.length):
            if position in state.dropped_tokens:
                continue
            depth = position // BLOCK
            self.bring(state, range(depth, depth + 1))
            (run,) = self.machine.runs(state, position, 1)
            content = self.content(run.entry)
            values.append(content[run.first])
            assert content[BLOCK + run.first] == values[-1] + 1_000_000
        return values

    def write(self, state: SequenceState, position: int, value: int) -> None:
        self.machine.check_kept(state, position, state.length, "overwrite")
        self.bring(state, range(position // BLOCK, len(state.blocks)))
        self.copy(self.machine.own([state], [position]))
        (run,) = self.machine.runs(state, position, 1)
        for layer in range(LAYERS):
            self.memory[layer, run.entry, run.first] = value + 1_000_000 * layer

    def truncate(self, state: SequenceState, tokens: int) -> None:
        self.machine.check_kept(state, tokens, tokens, "truncate")
        for block in self.machine.unsealed_by(state, tokens):
            self.bring(state, range(block.depth, block.depth + 1))
        self.copy(self.machine.truncate([state], [tokens]))
