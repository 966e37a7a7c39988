"""What the users of open sequences do: open them from cached prompts, append, fork, cut, overwrite, read and close.

One user does one thing after another with the sequences that it has opened; several users share a worker's resident
set. What a user reads must be what it appended, or a block is lost, which a user answers by truncating or closing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from kvcluster.replay.kernel import MS, Script
from tests.sim.sequence_worker import OpenSequence, SequenceSurroundings, SequenceWorker
from tests.sim.violation import require

MOST_OPEN = 4
"""Sequences that one user has open."""
PROMPTS = 3
PROMPT_TOKENS = 7
BRANCHES = 4
"""Different token ids that may follow at a position, so that workers make the same blocks."""


def user(world: SequenceSurroundings, worker: SequenceWorker) -> Script:
    """Uses sequences until the world says that work is over, and closes them."""
    rng, load = world.sequence_rng, world.scenario.sequences
    assert load is not None
    mine: list[OpenSequence] = []
    worker.users += 1
    while world.working:
        yield None, int(2 * load.think_ns * rng.random())
        if world.working:
            weights = _WEIGHTS_WITH_FLUSHES if load.flushes else _WEIGHTS
            name = rng.choices(_NAMES, cum_weights=weights)[0] if mine else "open"
            world.journal.add((world.kernel.now, worker.name, name, ()))
            yield from _ERRANDS[name][1](world, worker, mine)
    for sequence in mine:
        yield from _read_all(worker, sequence)
        worker.close(sequence)
        yield None, int(20 * MS * rng.random())
    worker.users -= 1


def _open(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    rng = world.sequence_rng
    if len(mine) == MOST_OPEN:
        worker.close(mine.pop(rng.randrange(MOST_OPEN)))
    prompt = 1 + rng.randrange(PROMPTS)
    tokens = [prompt] * (PROMPT_TOKENS if rng.random() < 0.8 else 0)
    sequence = yield from worker.open_sequence(tokens, max_tokens=64)
    rest = tokens[sequence.state.length :]
    if not rest or (yield from worker.append(sequence, rest, with_ids=True)):
        mine.append(sequence)
    else:
        worker.close(sequence)


def _append(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    rng, sequence = world.sequence_rng, world.sequence_rng.choice(mine)
    state, count = sequence.state, rng.choice((1, 1, 2, 3, 5))
    if not state.drop_oldest:
        count = min(count, state.max_tokens - state.length)
    if count:
        with_ids = rng.random() < 0.85
        tokens = [100 + rng.randrange(BRANCHES)] * count if with_ids else worker.fresh(count)
        if not (yield from worker.append(sequence, tokens, with_ids=with_ids)):
            mine.remove(sequence)
            worker.close(sequence)


def _fork(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    child = worker.fork(world.sequence_rng.choice(mine))
    if len(mine) == MOST_OPEN:
        worker.close(mine.pop(world.sequence_rng.randrange(MOST_OPEN)))
    mine.append(child)
    yield from ()


def _truncate(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    rng, sequence = world.sequence_rng, world.sequence_rng.choice(mine)
    length = sequence.state.length
    keep = rng.randint(max(0, length - 2), length) if rng.random() < 0.5 else rng.randint(0, length)
    gone = sequence.state.dropped_tokens
    yield from worker.truncate(sequence, gone.stop if keep in gone[1:] else keep)


def _write(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    rng, sequence = world.sequence_rng, world.sequence_rng.choice(mine)
    length = sequence.state.length
    position = rng.randrange(max(0, length - 6), length) if length else 0
    if length and position >= sequence.state.dropped_tokens.stop:
        written = yield from worker.write(sequence, position, worker.fresh(1)[0])
        world.count("sequence", "overwritten" if written else "not overwritten")


def _read(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    rng, sequence = world.sequence_rng, world.sequence_rng.choice(mine)
    length = sequence.state.length
    if not length:
        return
    position = rng.randrange(length)
    count, gone = rng.randint(1, length - position), sequence.state.dropped_tokens
    if position in gone:
        return
    count = min(count, gone.start - position) if position < gone.start else count
    lost = yield from _read_span(worker, sequence, position, count)
    if lost is not None:
        if rng.random() < 0.5 and (yield from worker.truncate(sequence, lost)):
            return
        mine.remove(sequence)
        worker.close(sequence)


def _flush(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    worker.seal(world.sequence_rng.choice(mine))
    yield from ()


def _close(world: SequenceSurroundings, worker: SequenceWorker, mine: list[OpenSequence]) -> Script:
    worker.close(mine.pop(world.sequence_rng.randrange(len(mine))))
    yield from ()


def _read_all(worker: SequenceWorker, sequence: OpenSequence) -> Script:
    """Reads a sequence a block at a time, until one is lost."""
    step = worker.block_tokens
    for position in range(0, sequence.state.length, step):
        count = min(step, sequence.state.length - position)
        if position in sequence.state.dropped_tokens:
            continue
        if (yield from _read_span(worker, sequence, position, count)) is not None:
            return


def _read_span(worker: SequenceWorker, sequence: OpenSequence, position: int, count: int) -> Script:
    """Reads tokens and judges them. Returns the position of a lost block, if there is one."""
    expected = sequence.values[position : position + count]
    got = yield from worker.read(sequence, position, count)
    if isinstance(got, int):
        return None if got < 0 else got
    require(got == expected, f"tokens {position} to {position + count} of a sequence are not those that were appended")
    worker.world.count("sequence", "read")
    return None


_ERRANDS: dict[str, tuple[int, Callable[[SequenceSurroundings, SequenceWorker, list[OpenSequence]], Script]]] = {
    "open": (8, _open),
    "append": (55, _append),
    "fork": (8, _fork),
    "truncate": (8, _truncate),
    "write": (3, _write),
    "read": (20, _read),
    "close": (5, _close),
    "flush": (15, _flush),
}
"""What users do, and how often beside the others."""
_NAMES = list(_ERRANDS)
_WEIGHTS_WITH_FLUSHES = list(accumulate(weight for weight, _ in _ERRANDS.values()))
_WEIGHTS = list(accumulate(weight * (name != "flush") for name, (weight, _) in _ERRANDS.items()))
