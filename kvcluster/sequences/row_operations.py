"""What Sequence and SequenceBatch do with their rows: an operation is done for all of them or, if it raises, for none.

Blocks that an operation needs are brought into the resident set first, and held there together. Everything that may
still fail is checked for all rows before the first one is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvcluster.errors import CallerError
from kvcluster.sequences.block_table import TokenRun
from kvcluster.sequences.runner import SequenceRunner
from kvcluster.sequences.state import SealExtent, SequenceState, random_name
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from torch import Tensor

    from kvcluster.sequences.loads import SequenceLoads

R = TypeVar("R")


class SequenceRow(NamedTuple):
    """A sequence, and the positions of it that an operation is about."""

    state: SequenceState
    positions: range

    @property
    def depths(self) -> range:
        """The depths of the blocks that hold these positions."""
        step = self.state.block_tokens
        return range(self.positions.start // step, -(-self.positions.stop // step)) if self.positions else range(0)


class RowOperations:
    """The operations on sequences of one client."""

    def __init__(self, runner: SequenceRunner, loads: SequenceLoads) -> None:
        self._runner = runner
        self._machine = runner.machine
        self._memory = runner.memory
        self._loads = loads

    # ------------------------------------------------------------------------------------------ growing

    def append(
        self,
        states: Sequence[SequenceState],
        layer: int,
        tokens: Sequence[int],
        values: Sequence[Tensor],
        deadline: Deadline,
    ) -> None:
        """Appends the next `tokens[i]` tokens of each sequence to one layer. Raises as OpenSequences.begin_step;
        ResidentSetFull as SequenceRunner.with_room."""
        with self._runner.lock:
            self._runner.with_room(lambda: self._append(states, layer, tokens, values), deadline)

    def update(
        self,
        states: Sequence[SequenceState],
        layer: int,
        tokens: Sequence[int],
        values: Sequence[Tensor],
        deadline: Deadline,
    ) -> list[list[Tensor]]:
        """Appends, and returns the tokens of the layer that each sequence keeps, one tensor a plane. Raises as `append`
        and `read`."""
        rows = [SequenceRow(state, positions) for state in states for positions in state.kept(state.length)]

        def append_and_read() -> list[list[Tensor]]:
            self._append(states, layer, tokens, values)
            return [self._read(layer, state, state.kept(state.length + state.step)) for state in states]

        return self._with_blocks(rows, deadline, append_and_read, hold=True)

    def reserve(self, states: Sequence[SequenceState], tokens: Sequence[int], deadline: Deadline) -> None:
        """Takes the pages that `tokens[i]` more tokens of each sequence need. Raises as OpenSequences.reserve."""
        with self._runner.lock:
            copies = self._runner.with_room(lambda: self._machine.reserve(states, tokens), deadline)
            self._memory.copy(copies)

    def mark_written(self, states: Sequence[SequenceState], layer: int | None, tokens: Sequence[int]) -> None:
        """As OpenSequences.mark_written. Raises CallerError, too, if there is no such layer."""
        if layer is not None:
            self._memory.check_layer(layer)
        with self._runner.lock:
            self._machine.mark_written(states, layer, tokens)

    # ------------------------------------------------------------------------------------ reading and overwriting

    def read(self, layer: int, rows: Sequence[SequenceRow], deadline: Deadline) -> list[list[Tensor]]:
        """Returns a copy of these tokens of one layer, one tensor a plane for each row. Raises CallerError for
        positions that a row does not have; ResidentSetFull; LostTokens."""
        for state, positions in rows:
            self._check_range(layer, state, positions, state.length + (state.step if layer in state.appended else 0))
        return self._with_blocks(
            rows, deadline, lambda: [self._read(layer, row.state, [row.positions]) for row in rows]
        )

    def write(self, layer: int, rows: Sequence[SequenceRow], values: Sequence[Tensor], deadline: Deadline) -> None:
        """Overwrites these tokens of one layer. Raises as `read`."""
        for state, positions in rows:
            self._check_range(layer, state, positions, state.length)
            self._machine.check_kept(state, positions.start, state.length, "overwrite")
        rows = [row for row in rows if row.positions]
        states = [row.state for row in rows]

        def overwrite() -> None:
            self._memory.copy(self._machine.own(states, [row.positions.start for row in rows]))
            self._memory.write(layer, self._runs(rows), values)
            self._sealed_fewer(states)

        needed = [SequenceRow(state, range(positions.start, state.length)) for state, positions in rows]
        self._with_blocks(needed, deadline, overwrite)

    def load(self, rows: Sequence[SequenceRow], deadline: Deadline) -> None:
        """Loads these tokens into the resident set. Raises as `read`."""
        for state, positions in rows:
            self._check_range(0, state, positions, state.length)
        self._with_blocks(rows, deadline, lambda: None)

    # ------------------------------------------------------------------------------------ cutting and sharing

    def truncate(self, states: Sequence[SequenceState], tokens: Sequence[int], deadline: Deadline) -> None:
        """Keeps the first `tokens[i]` tokens of each sequence. Raises as OpenSequences.truncate; LostTokens."""
        for state, count in zip(states, tokens, strict=True):
            self._machine.check_kept(state, min(count, state.length), count, "truncate")
        cuts = [
            SequenceRow(state, range(count, count + 1))
            for state, count in zip(states, tokens, strict=True)
            if count < state.length and count % state.block_tokens
        ]

        def cut() -> None:
            self._memory.copy(self._machine.truncate(states, tokens))
            self._sealed_fewer(states)

        self._with_blocks(cuts, deadline, cut)

    def fork(self, states: Sequence[SequenceState]) -> list[SequenceState]:
        """Opens another sequence with the tokens of each. Raises as OpenSequences.fork."""
        with self._runner.lock:
            for state in states:
                self._machine.check_between_steps(state, "fork")
            children = [self._machine.fork(state, random_name()) for state in states]
            for child, parent in zip(children, states, strict=True):
                self._runner.keeper.opened(child, parent)
            self._runner.wake()
        return children

    def flush(self, states: Sequence[SequenceState], deadline: Deadline) -> bool:
        """Seals all full blocks, and waits until they are stored and other workers find them. Returns False if the
        deadline passes first or a store has failed."""
        runner = self._runner
        with runner.lock:
            for state in states:
                for sealed in self._machine.seal(state, SealExtent.ALL):
                    runner.keeper.sealed(sealed)
            stored = runner.wait_for_stores(lambda: all(map(self._machine.is_stored, states)), deadline)
        return runner.flush_shards(deadline) and stored

    # ------------------------------------------------------------------------------------------- helpers

    def _with_blocks(
        self, rows: Sequence[SequenceRow], deadline: Deadline, call: Callable[[], R], *, hold: bool = False
    ) -> R:
        """Loads all blocks of these rows into the resident set, then calls `call` in the lock and returns its result.
        While it raises ResidentSetFull it is called again, as by SequenceRunner.with_room. With `hold` none of these
        blocks gives up its page for one that the call takes."""
        runner = self._runner

        def away() -> bool:
            return any(row.state.absent(row.depths) for row in rows)

        while True:
            brings = away()
            held = rows if brings or hold else ()
            blocks = dict.fromkeys(row.state.blocks[depth] for row in held for depth in row.depths)
            with runner.holding([*blocks], deadline) if held else nullcontext():
                for row in rows if brings else ():
                    self._loads.bring(row.state, row.depths, deadline)
                with runner.lock:
                    made = runner.with_room(lambda: None if away() else (call(),), deadline)
            if made is not None:
                return made[0]

    def _append(
        self, states: Sequence[SequenceState], layer: int, tokens: Sequence[int], values: Sequence[Tensor]
    ) -> None:
        runs, copies = self._machine.begin_step(states, layer, tokens)
        self._memory.copy(copies)
        self._memory.write(layer, runs, values)

    def _read(self, layer: int, state: SequenceState, ranges: Sequence[range]) -> list[Tensor]:
        return self._memory.read(layer, self._runs([SequenceRow(state, positions) for positions in ranges]))

    def _runs(self, rows: Sequence[SequenceRow]) -> list[TokenRun]:
        return [run for row in rows for run in self._machine.runs(row.state, row.positions.start, len(row.positions))]

    def _sealed_fewer(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            self._runner.keeper.cut(state)
        self._runner.wake()

    def _check_range(self, layer: int, state: SequenceState, positions: range, length: int) -> None:
        self._memory.check_layer(layer)
        first, stop = positions.start, positions.stop
        if stop > length:
            raise CallerError(f"tokens {first} to {stop} are not all there: layer {layer} has {length}")
        self._machine.check_kept(state, first, stop, "read or write")
