"""The fuzzer: makes thousands of inputs, and checks a parser's contract with each.

Whatever comes in, a parser returns a value of a type that valid inputs give, or raises an error that it documents. A
value that can be written is read again as the same. Of every few hundred inputs one is watched while it is read: how
many lines of Python run and how much memory is taken must stay in proportion to the input's length, which a parser
that hangs, or that believes a length before it has looked, exceeds. And when all is done, as much memory is in use as
was at the beginning.

Inputs come in batches of which each has a seed of its own, so the last batch repeats as well as the first. What is
found is shrunk, and told with the command that repeats it.
"""

from __future__ import annotations

import base64
import gc
import resource
import shlex
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.contract import Parser
from tests.fuzz.mutator import Mutator

BATCH = 1_000
WATCHED_EVERY = 250
REREAD_EVERY = 16

LINES, LINES_A_BYTE = 20_000, 200
"""Lines of Python for an input: a constant for what an empty one costs, and a share for each byte."""

MEMORY_A_BYTE = 1_024
"""Bytes of memory for a byte of input. An object or an error with its text is some hundred bytes."""

GROWN_OBJECTS, GROWN_BYTES = 3_000, 32 * 2**20
"""What may be left after a run, in objects of Python and in memory of the process, which C code takes too. A leak of
one object an input would leave as many as there were inputs."""


SHRINKING = 1_000
"""Tries to make an input shorter: what hangs or is long is told within a minute all the same."""


class Finding(AssertionError):
    """A parser broke its contract."""


@dataclass(frozen=True)
class Tally:
    """Counts the outcomes of a parser's inputs."""

    inputs: int
    accepted: int
    refused: int
    grown_objects: int


class Fuzz:
    """One parser under fire."""

    def __init__(self, parser: Parser, seed: int) -> None:
        self._parser = parser
        self._seed = seed
        trees = parser.trees()
        self._mutator = Mutator(trees, parser.words)
        self._types = {type(parser.read(tree.whole)) for tree in trees}

    def run(self, inputs: int) -> Tally:
        """Raises Finding."""
        counts = [0, 0]
        before = (0, 0)
        for batch in range(-(-inputs // BATCH)):
            self._batch(batch, min(BATCH, inputs - batch * BATCH), counts)
            if batch == 0:  # what is made once and kept has been made by now
                before = _in_use()
        objects, nbytes = (now - then for now, then in zip(_in_use(), before, strict=True))
        if objects > GROWN_OBJECTS or nbytes > GROWN_BYTES:
            raise Finding(f"{self._parser.name}: {inputs} inputs left {objects} objects and {nbytes} bytes behind")
        return Tally(inputs, *counts, objects)

    def check(self, data: bytes, *, watched: bool = True) -> bool:
        """Is this one input accepted? Raises Finding where the contract is broken."""
        lines = LINES + LINES_A_BYTE * len(data)
        memory = self._parser.memory + MEMORY_A_BYTE * len(data)
        try:
            value = _watched(self._parser.read, data, lines, memory) if watched else self._parser.read(data)
        except self._parser.raises:
            return False
        except Exception as error:
            raise Finding(f"raised {error!r}") from error
        self._judge(value)
        return True

    def _batch(self, batch: int, inputs: int, counts: list[int]) -> None:
        rng = Random(f"{self._seed}/{self._parser.name}/{batch}")
        make, read, raises, types = self._mutator.make, self._parser.read, self._parser.raises, self._types
        accepted = refused = 0
        data = b""
        try:
            for number in range(inputs):
                data = make(rng)
                if number % WATCHED_EVERY == 0:
                    self.check(data)
                try:
                    value = read(data)
                except raises:
                    refused += 1
                    continue
                accepted += 1
                if type(value) not in types or accepted % REREAD_EVERY == 0:
                    self._judge(value)
        except BaseException as error:  # of pytest-timeout too: an input that hangs has to be told
            self._tell(batch, data, error)
        counts[0] += accepted
        counts[1] += refused

    def _judge(self, value: Any) -> None:
        """Raises Finding for a value that is none of this parser's, or not the same when written and read again."""
        if type(value) not in self._types:
            raise Finding(f"returned {type(value).__name__}")
        write = self._parser.write
        if write is None:
            return
        try:
            again = self._parser.read(write(value))
        except Exception as error:
            raise Finding(f"accepted {value!r}, which cannot be written and read again: {error!r}") from error
        if again != value:
            raise Finding(f"accepted {value!r}, which is read again as {again!r}")

    def _tell(self, batch: int, data: bytes, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, Exception):
            watched = isinstance(error, Finding)  # else it fails unwatched too, which is quicker
            data = shrunk(data, lambda shorter: self._fails(shorter, watched=watched))
        what = str(error) if isinstance(error, Finding) else f"raised {error!r}"
        name = shlex.quote(self._parser.name)
        raise Finding(
            f"{self._parser.name} (seed {self._seed}, batch {batch}) {what:.2000}\n"
            f"input, shrunk to {len(data)} bytes: {data[:200].hex()}{'...' if len(data) > 200 else ''}\n"
            f"to repeat it: python -m tests.fuzz --parser {name} --input {spelt(data)}\n"
            f"to find it again: python -m tests.fuzz --parser {name} --seed {self._seed} --inputs {(batch + 1) * BATCH}"
        ) from error

    def _fails(self, data: bytes, *, watched: bool) -> bool:
        try:
            self.check(data, watched=watched)
        except Finding:
            return True
        return False


def spelt(data: bytes) -> str:
    """Returns an input as it is written on a command line: in hex, or compressed if that is long."""
    return data.hex() if len(data) <= 200 else "z" + base64.urlsafe_b64encode(zlib.compress(data, 9)).decode()


def unspelt(text: str) -> bytes:
    """The inverse."""
    return zlib.decompress(base64.urlsafe_b64decode(text[1:])) if text[:1] == "z" else bytes.fromhex(text)


def shrunk(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """A shorter input that fails too: without pieces that can be left out, as far as SHRINKING tries find them."""
    step, tries = len(data) // 2, SHRINKING
    while step and tries:
        at = 0
        while at < len(data) and tries:
            tries -= 1
            shorter = data[:at] + data[at + step :]
            if fails(shorter):
                data = shorter
            else:
                at += step
        step //= 2
    return data


def _in_use() -> tuple[int, int]:
    """Objects of Python, and bytes of the process."""
    gc.collect()
    return sys.getallocatedblocks(), int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _watched(read: Callable[[bytes], object], data: bytes, most_lines: int, most_memory: int) -> object:
    """Reads while lines and memory are counted. Raises Finding if either exceeds its bound."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines > most_lines:
            raise Finding(f"more than {most_lines} lines run for {len(data)} bytes")
        return count

    tracer = sys.gettrace()
    tracemalloc.start()
    sys.settrace(count)
    try:
        return read(data)
    finally:
        sys.settrace(tracer)
        _, taken = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if taken > most_memory:
            raise Finding(f"{taken} bytes of memory taken for {len(data)} bytes")
